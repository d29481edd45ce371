"""LoRA adapters merged into a target: peft's own merge and logits, and what is no plain LoRA."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from d2sd.build.plan import make_plan
from d2sd.convert.checkpoint.lora import CONFIG, WEIGHTS
from d2sd.convert.checkpoint.target import load_target, write_target
from d2sd.errors import CheckpointError
from d2sd.manifest import load_manifest
from d2sd.modeling.config import Family
from d2sd.recipe import Target, load_recipe
from tests.convert.helpers import edit_json, edit_tensors, edit_yaml, write_project, write_target_dir
from tests.d2sd.build.helpers import run
from tests.tiny import tiny_decoder

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(folder: Path, target: Path, seed: int = 0, **settings: Any) -> Path:
    """An adapter of random matrices, as peft writes it."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": LINEAR, "init_lora_weights": False}
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    get_peft_model(model, LoraConfig(**(values | settings))).save_pretrained(str(folder))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target_dir(tmp_path / "target", tiny_decoder("llama", tie=True))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
        {"alpha_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 9}, "rank_pattern": {"k_proj": 2}},
    ],
)
def test_a_merged_target_is_pefts(tmp_path: Path, family: Family, settings: dict[str, Any]) -> None:
    """Merged weights and logits equal PEFT's; half of the second adapter is added."""
    source = write_target_dir(tmp_path / "source", tiny_decoder(family, tie=False))
    folders = [write_adapter(tmp_path / str(seed), source, seed, **settings) for seed in range(2)]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    first = PeftModel.from_pretrained(model, folders[0]).merge_and_unload()
    halved = shutil.copytree(folders[1], tmp_path / "halved")
    tensors = {name: t / 2 if "lora_B" in name else t for name, t in load_file(halved / WEIGHTS).items()}
    save_file(tensors, halved / WEIGHTS)
    theirs = PeftModel.from_pretrained(first, halved).merge_and_unload()
    write_target(source, tmp_path / "out", "fp32", adapters=[(folders[0], 1.0), (folders[1], 0.5)])
    ours = load_target(tmp_path / "out", torch.float32).state_dict()
    expected = {name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()}
    assert ours.keys() <= expected.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    ids = torch.randint(0, theirs.config.vocab_size, (2, 17))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(merged(ids).logits, theirs(ids).logits, atol=1e-5, rtol=0)
        assert (merged(ids).logits - plain(ids).logits).abs().max() > 1e-2


def test_a_sum_is_rounded_once(tmp_path: Path, target: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", target)
    write_target(target, tmp_path / "out", "bf16", adapters=[(adapter, 1.0)])
    write_target(target, tmp_path / "plain", "bf16")
    name, tensors = "layers.0.self_attn.q_proj.weight", load_file(adapter / WEIGHTS)
    a, b = (tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight"].double() for part in "AB")
    plain = load_target(tmp_path / "plain", torch.bfloat16).state_dict()[name]
    found = load_target(tmp_path / "out", torch.bfloat16).state_dict()[name]
    assert torch.equal(found, (plain.double() + 1.5 * (b @ a)).float().bfloat16())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("peft_type", "IA3"),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("fan_in_fan_out", 1),
        ("init_lora_weights", "pissa"),
        ("lora_alpha", None),
        ("lora_alpha", True),
        ("use_bdlora", {"nblocks": 2}),
        ("a_method_of_next_year", 1),
        ("alpha_pattern", {".*q_proj": 1}),
        ("alpha_pattern", {"q_proj": "1"}),
        ("alpha_pattern", [1]),
        ("use_rslora", "yes"),
    ],
)
def test_what_is_no_plain_lora_is_refused(tmp_path: Path, target: Path, key: str, value: Any) -> None:
    adapter = write_adapter(tmp_path / "adapter", target)
    edit_json(adapter / CONFIG, key, value)
    with pytest.raises(CheckpointError) as caught:
        write_target(target, tmp_path / "out", "fp32", adapters=[(adapter, 1.0)])
    assert key in str(caught.value)
    assert not (tmp_path / "out").exists()


WIDTH = tiny_decoder().config.body.hidden_size
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({f"{QUERY}.lora_magnitude_vector": torch.ones(4)}, "lora_magnitude_vector"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 4)}, "lora_embedding_A"),
        ({"base_model.model.lm_head.weight": torch.ones(4, 4)}, "lm_head"),
        ({f"{QUERY}.lora_B.weight": None}, "lora_B"),
        ({f"{QUERY}.lora_A.weight": torch.ones(4, 5)}, "q_proj"),
        ({f"{QUERY}.lora_A.weight": torch.ones(0, WIDTH)}, "q_proj"),
        ({f"{QUERY}.lora_A.weight": torch.tensor(1.0)}, "q_proj"),
        ({f"{QUERY}.lora_A.weight": torch.full((4, WIDTH), torch.nan)}, "lora_A"),
        ({f"{QUERY}.lora_A.weight": torch.full((4, WIDTH), 3e38)}, "merged"),
        ({f"{QUERY.replace('0', '9')}.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}, "layers.9"),
        ({f"base_model.model.lm_head.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}, "lm_head"),
    ],
)
def test_tensors_that_are_not_of_the_target_are_refused(
    tmp_path: Path, target: Path, tensors: dict[str, torch.Tensor | None], named: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", target)
    stored: dict[str, torch.Tensor | None] = {**load_file(adapter / WEIGHTS), **tensors}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, adapter / WEIGHTS)
    with pytest.raises(CheckpointError) as caught:
        write_target(target, tmp_path / "out", "fp32", adapters=[(adapter, 1.0)])
    assert named in str(caught.value)


def test_folders_without_an_adapter_are_refused(tmp_path: Path, target: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", target)
    for name, content in (
        (WEIGHTS, None),
        (WEIGHTS, b"\x80\x04pickle"),
        (CONFIG, b"[]"),
        (CONFIG, b"{"),
        (CONFIG, None),
    ):
        file = adapter / name
        before = file.read_bytes()
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(CheckpointError, match="adapter"):
            write_target(target, tmp_path / "out", "fp32", adapters=[(adapter, 1.0)])
        file.write_bytes(before)
    missing = tmp_path / "none"
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        write_target(target, tmp_path / "out", "fp32", adapters=[(missing, 1.0)])
    assert caught.value.where == missing
    assert "target.lora" in str(caught.value)


def test_a_bundle_serves_the_merged_target(tmp_path: Path) -> None:
    """A recipe's adapter is in the plan, in the manifest and in the bytes; another scale builds the target again."""
    recipe = write_project(tmp_path)
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "target")
    plain = run(recipe, tmp_path / "plain")
    for number, scale in enumerate((1.0, 0.5)):
        edit_yaml(recipe, "target.lora", {"path": "adapter", "scale": scale})
        out = tmp_path / f"merged-{number}"
        found = run(recipe, out)
        assert {name for name in plain if plain[name] != found[name]} == {"manifest.json", "target/model.safetensors"}
        write_target(tmp_path / "target", tmp_path / f"target-{number}", "fp32", adapters=[(adapter, scale)])
        assert found["target/model.safetensors"] == (tmp_path / f"target-{number}" / "model.safetensors").read_bytes()
        assert load_manifest(out).recipe.target.lora[0].scale == scale
        run(recipe, tmp_path / "one")  # the stages of the build before
    assert (tmp_path / "one/target/model.safetensors").read_bytes() == found["target/model.safetensors"]


@pytest.mark.parametrize("fault", ["missing", "shape", "key"])
def test_a_plan_refuses_an_adapter(tmp_path: Path, fault: str) -> None:
    recipe = write_project(tmp_path)
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "target")
    edit_yaml(recipe, "target.lora", "adapter" if fault != "missing" else ["adapter", "nowhere"])
    if fault == "shape":
        edit_tensors(adapter / WEIGHTS, **{f"{QUERY}.lora_A.weight".replace(".", "__"): torch.ones(4, 5)})
    if fault == "key":
        edit_json(adapter / CONFIG, "use_dora", True)
    with pytest.raises(CheckpointError):
        make_plan(load_recipe(recipe), weights=False)
    with pytest.raises(CheckpointError):
        run(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("written", [None, [], ()])
def test_no_adapter_may_be_written_as_null(written: Any) -> None:
    assert Target.model_validate({"path": "x", **({} if written == () else {"lora": written})}).lora == []
