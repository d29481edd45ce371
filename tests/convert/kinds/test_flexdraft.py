"""A FlexDraft head on disk: the same bytes after a round trip, the release's spelling, and refusals by key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from d2sd.convert.checkpoint.quantization import Quantization
from d2sd.convert.kinds import DFLASH, read_kind
from d2sd.convert.kinds.flexdraft import KIND as FLEXDRAFT
from d2sd.errors import CheckpointError
from d2sd.modeling.config import BodyConfig, Family, RopeConfig
from d2sd.policies import DrafterRole
from tests.convert.helpers import edit_json, edit_tensors, tree_bytes
from tests.tiny import in_fp8, tiny_decoder, tiny_flex

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0)
TARGET = tiny_decoder("qwen3", layers=4)
CONFIG = tiny_flex(TARGET, layers=2).config
FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head = tiny_flex(TARGET, layers=2)
    FLEXDRAFT.write(tmp_path / "head", head.config, head.state_dict())
    return tmp_path / "head"


def released(folder: Path) -> Path:
    """Rewrites a head like the authors' release: block under the other key, one id, unused parts of every layer."""
    values = json.loads((folder / "config.json").read_text())
    block = values.pop("flexdraft_config") | {"target_layer_ids": [2], "mask_token_id": 63}
    values |= {"dflash_config": block, "architectures": ["FlexDraftBiasModel"], "transformers_version": "4.56.0"}
    (folder / "config.json").write_text(json.dumps(values))
    unused = {f"layers.{i}.mlp.{part}_proj.weight": torch.ones(2) for i in (0, 1) for part in ("gate", "up", "down")}
    unused |= {
        f"layers.{i}.{part}_layernorm.weight": torch.ones(3) for i in (0, 1) for part in ("input", "post_attention")
    }
    edit_tensors(folder / "model.safetensors", **unused, **{"norm.weight": torch.ones(5)})
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", [RopeConfig(1e4), LLAMA3], ids=lambda r: r.kind)
def test_round_trip(tmp_path: Path, family: Family, rope: RopeConfig) -> None:
    target = tiny_decoder(family, layers=4, rope=rope, attention_bias=family == "llama")
    head = tiny_flex(target, layers=3, draft_vocabulary=(0, 4, 9), anchored=family == "llama")
    FLEXDRAFT.write(tmp_path / "a", head.config, head.state_dict())
    again = FLEXDRAFT.load(tmp_path / "a", torch.float32)
    assert again.config == head.config
    FLEXDRAFT.write(tmp_path / "b", again.config, again.state_dict())
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")
    assert FLEXDRAFT.fingerprint(again) == FLEXDRAFT.fingerprint(head)
    FLEXDRAFT.check(again.config, target.config, DrafterRole.FIRST, 4, tmp_path)


def test_a_head_for_experts_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", "model_type", "qwen3_moe")
    with pytest.raises(CheckpointError, match=r"model_type(.|\n)*qwen3_moe(.|\n)*expected:.*qwen3"):
        FLEXDRAFT.load(folder, torch.float32)


def test_every_field_is_written(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    assert values["flexdraft_config"] == {
        "anchor_bias_rank": 8,
        "anchored": False,
        "enable_anchor_bias_logits": True,
        "target_layer_ids": [2, 3],
    }
    assert {key: values[key] for key in ("num_hidden_layers", "num_target_layers", "block_size", "rope_theta")} == {
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "block_size": 4,
        "rope_theta": 10000.0,
    }
    names = load_file(folder / "model.safetensors").keys()
    assert {"mask_embedding", "anchor_bias_mlp.0.weight", "anchor_bias_mlp.2.bias"} < names
    assert not any("mlp.gate" in name or "layernorm" in name for name in names)


def test_the_release_is_read_as_what_it_means(folder: Path) -> None:
    plain = FLEXDRAFT.load(folder, torch.float32)
    again = FLEXDRAFT.load(released(folder), torch.float32)
    assert again.config == plain.config
    assert FLEXDRAFT.fingerprint(again) == FLEXDRAFT.fingerprint(plain)


def test_both_keys_may_stand_if_they_agree(folder: Path) -> None:
    block = json.loads((folder / "config.json").read_text())["flexdraft_config"]
    edit_json(folder / "config.json", "dflash_config", block)
    assert FLEXDRAFT.read_config(folder) == CONFIG
    edit_json(folder / "config.json", "dflash_config", block | {"anchor_bias_rank": 9})
    with pytest.raises(CheckpointError, match="disagree") as caught:
        FLEXDRAFT.read_config(folder)
    assert str(caught.value.where).endswith("config.json: dflash_config")


WRONG: dict[str, tuple[str, Any, str, str]] = {
    "no block": ("flexdraft_config", ..., "not a FlexDraft head", "flexdraft_config"),
    "no calibration": ("flexdraft_config.enable_anchor_bias_logits", False, "calibration", "enable_anchor_bias_logits"),
    "calibration unsaid": ("flexdraft_config.enable_anchor_bias_logits", ..., "calibration", "anchor_bias_logits"),
    "no rank": ("flexdraft_config.anchor_bias_rank", ..., "missing", "anchor_bias_rank"),
    "anchored is no boolean": ("flexdraft_config.anchored", "yes", "wrong type", "anchored"),
    "every layer": ("num_hidden_layers", 4, "split layer is out of range", "num_hidden_layers"),
    "more layers": ("num_hidden_layers", 9, "split layer is out of range", "num_hidden_layers"),
    "other layers": ("flexdraft_config.target_layer_ids", [1, 2], "not the target's last", "target_layer_ids"),
    "another split": ("flexdraft_config.target_layer_ids", [3], "not the target's last", "target_layer_ids"),
    "no layers": ("flexdraft_config.target_layer_ids", ..., "missing", "target_layer_ids"),
    "block of one": ("block_size", 1, "block size", "block_size"),
    "two blocks": ("flexdraft_config.block_size", 8, "block size", "block_size"),
    "unknown key": ("flexdraft_config.window", 8, "unknown", "window"),
    "unknown key above": ("gate", 8, "unknown", "gate"),
    "another class": ("architectures", ["DFlashDraftModel"], "not supported", "architectures"),
}


@pytest.mark.parametrize(("key", "value", "what", "where"), WRONG.values(), ids=WRONG)
def test_a_config_that_is_wrong(folder: Path, key: str, value: Any, what: str, where: str) -> None:
    edit_json(folder / "config.json", key, value)
    with pytest.raises(CheckpointError, match=what) as caught:
        FLEXDRAFT.read_config(folder)
    assert str(caught.value.where).endswith(where)
    assert caught.value.expected is not None


OTHERS: dict[str, tuple[str, Any]] = {
    "family": ("model_type", tiny_decoder("llama", layers=4).config),
    "depth": ("num_target_layers", tiny_decoder("qwen3", layers=5).config),
    "vocabulary": ("vocab_size", tiny_decoder("qwen3", layers=4, vocab=65).config),
    "rope": ("rope_theta and rope_scaling", tiny_decoder("qwen3", layers=4, rope=RopeConfig(5.0)).config),
    "width": ("hidden_size", tiny_decoder("qwen3", layers=4, hidden=16).config),
    "heads": ("num_attention_heads", tiny_decoder("qwen3", layers=4, heads=2).config),
    "K/V heads": ("num_key_value_heads", tiny_decoder("qwen3", layers=4, kv_heads=4).config),
    "head size": ("head_dim", tiny_decoder("qwen3", layers=4, head_dim=16).config),
    "biases": ("attention_bias", tiny_decoder("qwen3", layers=4, attention_bias=True).config),
}


@pytest.mark.parametrize(("key", "target"), OTHERS.values(), ids=OTHERS)
def test_a_head_for_another_target(key: str, target: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="another target") as caught:
        FLEXDRAFT.check(CONFIG, target, DrafterRole.FIRST, 4, tmp_path)
    assert str(caught.value.where).endswith(f"config.json: {key}")
    assert caught.value.found != caught.value.expected


def test_norms_and_block_must_agree(tmp_path: Path) -> None:
    body: BodyConfig = replace(CONFIG.body, rms_norm_eps=1e-6)
    with pytest.raises(CheckpointError, match="another target"):
        FLEXDRAFT.check(replace(CONFIG, body=body), TARGET.config, DrafterRole.FIRST, 4, tmp_path)
    with pytest.raises(CheckpointError, match="another block size") as caught:
        FLEXDRAFT.check(CONFIG, TARGET.config, DrafterRole.FIRST, 8, tmp_path)
    assert caught.value.fix is not None
    assert "tree.block_size to 4" in caught.value.fix


def test_tensors_that_are_wrong(folder: Path) -> None:
    file = folder / "model.safetensors"
    edit_tensors(file, layers__0__extra=torch.ones(2))
    with pytest.raises(CheckpointError, match=r"unknown layers\.0\.extra"):
        FLEXDRAFT.check_tensors(folder, CONFIG)
    edit_tensors(file, layers__0__extra=None, mask_embedding=torch.ones(3))
    with pytest.raises(CheckpointError, match="mask_embedding"):
        FLEXDRAFT.check_tensors(folder, CONFIG)
    network = [name for name in load_file(file) if name.startswith("anchor_bias_mlp")]
    edit_tensors(file, **dict.fromkeys(network))
    with pytest.raises(CheckpointError, match=r"missing calibration\.inner"):
        FLEXDRAFT.load(folder, torch.float32)


def test_fp8_is_of_the_projections(tmp_path: Path) -> None:
    """The same bytes after a round trip; the calibration network, the anchor's projection and K/V cannot be FP8."""
    head = tiny_flex(TARGET, layers=2, anchored=True)
    narrow = in_fp8(head, FLEXDRAFT.fp8_layers(head.config))
    described = Quantization(FLEXDRAFT.unquantized, kv=False, producer=("modelopt", "1"))
    FLEXDRAFT.write(tmp_path / "a", head.config, narrow.state_dict(), described)
    assert FLEXDRAFT.check_tensors(tmp_path / "a", FLEXDRAFT.read_config(tmp_path / "a")) == described
    FLEXDRAFT.write(tmp_path / "b", head.config, FLEXDRAFT.load(tmp_path / "a", torch.float32).state_dict(), described)
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")
    config, separate = tmp_path / "a" / "config.json", tmp_path / "a" / "hf_quant_config.json"
    separate.unlink()
    for key, value, found in (
        ("kv_cache_scheme", FLOAT8, "K/V"),
        ("ignore", [], r"anchor_bias_mlp\.0, anchor_bias_mlp\.2, anchor_projection"),
    ):
        before = config.read_text()
        edit_json(config, f"quantization_config.{key}", value)
        with pytest.raises(CheckpointError, match=f"found: {found}"):
            FLEXDRAFT.read_config(tmp_path / "a")
        config.write_text(before)


def test_an_anchored_head_has_its_projection(folder: Path) -> None:
    """And no other head has one."""
    edit_json(folder / "config.json", "flexdraft_config.anchored", True)
    with pytest.raises(CheckpointError, match=r"anchor_projection\.weight"):
        FLEXDRAFT.load(folder, torch.float32)
    edit_tensors(folder / "model.safetensors", **{"anchor_projection.weight": torch.ones(32, 32)})
    assert FLEXDRAFT.load(folder, torch.float32).config.anchored
    edit_json(folder / "config.json", "flexdraft_config.anchored", False)
    with pytest.raises(CheckpointError, match=r"anchor_projection\.weight"):
        FLEXDRAFT.load(folder, torch.float32)


def test_it_is_no_dflash_drafter(folder: Path) -> None:
    """Under either key its config says what it is; as a DFlash drafter it is refused, with where it goes."""
    for one in (folder, released(folder)):
        assert read_kind(one) == "flexdraft"
        with pytest.raises(CheckpointError, match="FlexDraft") as caught:
            DFLASH.read_config(one)
        assert caught.value.fix == "name it as drafters.first in a recipe"
