"""The z-lab DFlash directory: written explicitly, read strictly, the same bytes after a round trip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from d2sd.convert.checkpoint.layout import fault, from_hidden_states, sort_columns, to_hidden_states, usual_ids
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DrafterConfig, RopeConfig
from d2sd.modeling.drafters.dflash import Drafter
from tests.convert.helpers import edit_json, tree_bytes
from tests.tiny import tiny_decoder, tiny_drafter

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0)
YARN = RopeConfig(1e6, "yarn", 4.0, 32768, beta_fast=30.0, attention_factor=1.2)


def written(folder: Path, config: DrafterConfig) -> Path:
    drafter = Drafter(config)
    DFLASH.write(folder, config, {name: tensor.bfloat16() for name, tensor in drafter.state_dict().items()})
    return folder


@pytest.fixture
def config() -> DrafterConfig:
    return tiny_drafter(tiny_decoder().config, role="variable_prefix").config


@pytest.mark.parametrize("role", ["first", "variable_prefix"])
@pytest.mark.parametrize("rope", [RopeConfig(1e4), RopeConfig(1e4, "linear", 2.0), LLAMA3, YARN], ids=lambda r: r.kind)
def test_round_trip(tmp_path: Path, role: Literal["first", "variable_prefix"], rope: RopeConfig) -> None:
    config = tiny_drafter(tiny_decoder(rope=rope).config, role=role).config
    folder = written(tmp_path / "a", config)
    assert DFLASH.read_config(folder) == config
    drafter = DFLASH.load(folder, torch.bfloat16)
    DFLASH.write(tmp_path / "b", drafter.config, drafter.state_dict())
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")


def test_what_other_readers_default_is_written(tmp_path: Path, config: DrafterConfig) -> None:
    values = json.loads((written(tmp_path, config) / "config.json").read_text())
    assert values["architectures"] == ["DFlashDraftModel"]
    assert values["block_size"] == 4
    assert values["rope_theta"] == 10000.0
    assert values["dtype"] == "bfloat16"
    assert values["dflash_config"] == {
        "block_size": 4,
        "is_causal": False,
        "mask_token_id": 63,
        "num_target_layers": 3,
        "prefix_weight_base": 0.9,
        "target_layer_ids": [0, 1],
        "training_mode": "vp_drafter",
    }


def test_the_public_spelling_is_read(tmp_path: Path, config: DrafterConfig) -> None:
    """A published first drafter has remote code, transformers 5's RoPE, its sizes in one place and no training mode."""
    path = written(tmp_path, config) / "config.json"
    values = json.loads(path.read_text())
    values |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "bos_token_id": 1, "eos_token_id": 2}
    values["rope_parameters"] = {"rope_theta": values.pop("rope_theta"), "rope_type": "default"}
    del values["rope_scaling"]
    values["dflash_config"] = {"mask_token_id": 63, "target_layer_ids": [0, 1]}
    path.write_text(json.dumps(values))
    assert DFLASH.read_config(tmp_path) == replace(config, role="first", prefix_weight_base=None)
    for key in ("block_size", "num_target_layers"):  # Qwen3.5's drafters keep them inside
        values["dflash_config"][key] = values.pop(key)
    path.write_text(json.dumps(values))
    assert DFLASH.read_config(tmp_path).block_size == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["Qwen3DSparkModel"]),  # shifted slots: loaded as DFlash it accepts next to nothing
        ("use_sliding_window", True),
        ("markov_head_type", "vanilla"),
        ("dflash_config.projector_type", "domino"),
        ("dflash_config.target_layer_ids", [0, "1"]),
        ("block_size", 0),
        ("hidden_size", True),
    ],
)
def test_what_would_mean_another_model_is_refused(
    tmp_path: Path, config: DrafterConfig, key: str, value: object
) -> None:
    written(tmp_path, config)
    edit_json(tmp_path / "config.json", "dflash_config.block_size", ...)  # given once, so that it is its value
    edit_json(tmp_path / "config.json", key, value)
    with pytest.raises(CheckpointError, match=rf"config\.json: {key.replace('.', ': ')}"):
        DFLASH.read_config(tmp_path)


@pytest.mark.parametrize(
    ("layers", "target_layers", "expected"),
    [(5, 36, [1, 9, 17, 25, 33]), (8, 24, [1, 4, 7, 10, 12, 15, 18, 21]), (1, 36, [18])],
)
def test_what_readers_take_where_nothing_is_written(layers: int, target_layers: int, expected: list[int]) -> None:
    """The first is what z-lab's Qwen3-8B drafter has."""
    assert usual_ids(layers, target_layers) == expected


@pytest.mark.parametrize("ids", [[], [0, 0], [-1, 2], [0, 4]])
def test_ids_that_cannot_be(ids: list[int]) -> None:
    assert fault(ids, 4) == "ids of different layers, 0 to 3"
    assert fault([3, 0], 4) is None


def test_columns_follow_their_ids_and_speculators_numbers_hidden_states() -> None:
    fc = torch.arange(12.0).view(2, 6)  # three blocks of two columns, for layers 4, 0 and 2
    assert sort_columns(fc, (4, 0, 2)).tolist() == [[2, 3, 4, 5, 0, 1], [8, 9, 10, 11, 6, 7]]
    assert to_hidden_states((1, 9, 17)) == [2, 10, 18]
    assert from_hidden_states([2, 10, 18]) == (1, 9, 17)
