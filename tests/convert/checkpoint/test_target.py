"""Reading and rewriting a target: RoPE spellings, shards, tied heads, and agreement with what transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.headers import INDEX
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.target import load_target, stop_tokens, write_target
from d2sd.errors import CheckpointError
from d2sd.modeling.config import Family, RopeConfig
from tests.convert.helpers import edit_json, edit_tensors, hf_fields, tree_bytes, write_target_dir
from tests.tiny import tiny_decoder

FAMILIES: tuple[Family, ...] = get_args(Family)


def same(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    loaded = load_target(folder, torch.float32).state_dict()
    return loaded.keys() == expected.keys() and all(torch.equal(loaded[n], t) for n, t in expected.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_is_read_and_rewritten(tmp_path: Path, family: Family, tie: bool) -> None:
    decoder = tiny_decoder(family, tie=tie)
    source = write_target_dir(tmp_path / "source", decoder)
    assert parse_target_config(HFConfig.read(source)) == decoder.config
    write_target(source, tmp_path / "out", "fp32")
    assert same(tmp_path / "out", decoder.state_dict())
    write_target(tmp_path / "out", tmp_path / "again", "fp32")
    assert tree_bytes(tmp_path / "again") == tree_bytes(tmp_path / "out")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_transformers_writes_is_read(tmp_path: Path, family: Family) -> None:
    """Bit by bit; tests/modeling/test_families.py compares logits of the others."""
    transformers = pytest.importorskip("transformers")
    fields = hf_fields(tiny_decoder(family, tie=False))
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert parse_target_config(HFConfig.read(tmp_path)) == tiny_decoder(family, tie=False).config
    stored = {name.removeprefix("model."): t for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert same(tmp_path, stored)


LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
ROPES: dict[str, tuple[dict[str, Any], RopeConfig]] = {
    "old": ({"rope_theta": 1e6, "rope_scaling": None}, RopeConfig(1e6)),
    "early Llama": ({}, RopeConfig(1e4)),
    "new": ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, RopeConfig(1e6)),
    "linear, first spelling": (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
        RopeConfig(1e4, "linear", 2.0),
    ),
    "llama3, old": (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0),
    ),
    "llama3, new": (
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
        RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0),
    ),
    "yarn": (
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        RopeConfig(1e6, "yarn", 4.0, 512),
    ),
    "yarn, untruncated": (
        {"rope_parameters": YARN | {"rope_theta": 1e6, "truncate": False, "beta_fast": 16.0}},
        RopeConfig(1e6, "yarn", 4.0, 512, beta_fast=16.0, truncate=False),
    ),
    "yarn, one of two scales": (
        {"rope_theta": 1e6, "rope_scaling": YARN | {"mscale": 0.7}},
        RopeConfig(1e6, "yarn", 4.0, 512),
    ),
}


def test_yarn_by_two_scales_is_transformers() -> None:
    """DeepSeek's keys; the factor of both, from transformers' own function."""
    scaling = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
    values = {k: v for k, v in hf_fields(tiny_decoder()).items() if not k.startswith("rope")}
    rope = parse_target_config(HFConfig(values | {"rope_theta": 1e6, "rope_scaling": scaling}, "config.json")).body.rope
    theirs = LlamaConfig(head_dim=16, rope_parameters={"rope_theta": 1e6, **scaling})
    assert rope.attention_factor == ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))[1]
    assert rope.attention_factor != 1


@pytest.mark.parametrize(("fields", "expected"), ROPES.values(), ids=ROPES.keys())
def test_rope_spellings(fields: dict[str, Any], expected: RopeConfig) -> None:
    values = {k: v for k, v in hf_fields(tiny_decoder()).items() if not k.startswith("rope")}
    assert parse_target_config(HFConfig(values | fields, "config.json")).body.rope == expected


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 0.7}, "mscale"),
        ({"rope_type": "default", "truncate": False}, "truncate"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rope_that_is_not_modelled_is_refused(scaling: dict[str, Any], named: str) -> None:
    values = hf_fields(tiny_decoder()) | {"rope_scaling": scaling}
    with pytest.raises(CheckpointError, match=named):
        parse_target_config(HFConfig(values, "config.json"))


def shard(folder: Path) -> dict[str, str]:
    """Cut a checkpoint in two, and return its map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return weight_map


def test_shards_stay_shards(tmp_path: Path) -> None:
    decoder = tiny_decoder(tie=False)
    source = write_target_dir(tmp_path / "source", decoder)
    weight_map = shard(source)
    assert same(source, decoder.state_dict())
    write_target(source, tmp_path / "out", "fp32")
    assert json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"] == weight_map
    assert same(tmp_path / "out", decoder.state_dict())


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../evil.safetensors", "outside"),
        ("model-00001-of-00002.safetensors", "disagree"),
        ("no.safetensors", "missing"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, file: str, message: str) -> None:
    source = write_target_dir(tmp_path, tiny_decoder())
    weight_map = shard(source)
    weight_map = dict.fromkeys(weight_map, file) if message == "missing" else weight_map | {"model.extra": file}
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        load_target(source, torch.float32)


def test_a_tied_head_may_be_stored_again_if_it_is_the_same(tmp_path: Path) -> None:
    decoder = tiny_decoder()
    source = write_target_dir(tmp_path / "source", decoder)
    edit_tensors(source / "model.safetensors", lm_head__weight=decoder.embed_tokens.weight.data.clone())
    write_target(source, tmp_path / "out", "fp32")
    assert same(tmp_path / "out", decoder.state_dict())
    edit_tensors(source / "model.safetensors", lm_head__weight=torch.ones_like(decoder.embed_tokens.weight.data))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight(.|\n)*tie_word_embeddings"):
        write_target(source, tmp_path / "other", "fp32")


def test_what_tells_of_the_writer_is_dropped_and_the_rest_kept(tmp_path: Path) -> None:
    source = write_target_dir(tmp_path / "source", tiny_decoder())
    edit_json(source / "config.json", "_name_or_path", "/home/me")
    edit_json(source / "config.json", "torch_dtype", "float32")
    (source / "modeling_evil.py").touch()
    write_target(source, tmp_path / "out", "bf16")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["dtype"] == "bfloat16"
    assert not {"_name_or_path", "torch_dtype"} & values.keys()
    assert not (tmp_path / "out" / "modeling_evil.py").exists()


@pytest.mark.parametrize(("written", "expected"), [(7, (7,)), ([7, 0], (7, 0))])
def test_stop_tokens_of_generation_config_win(tmp_path: Path, written: object, expected: tuple[int, ...]) -> None:
    source = write_target_dir(tmp_path / "source", tiny_decoder())
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
    write_target(source, tmp_path / "out", "fp32")
    assert stop_tokens(tmp_path / "out") == expected


def test_loading_can_be_given_up_between_two_tensors(tmp_path: Path) -> None:
    """Rank 0 gives up loading when another rank has ended."""
    source, calls = write_target_dir(tmp_path / "source", tiny_decoder("qwen3")), list[int]()

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError

    with pytest.raises(KeyError):
        load_target(source, torch.float32, None, check)
    assert len(calls) == 3
