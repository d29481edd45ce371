"""Configs that two readers would interpret differently are refused by key: RoPE, layer ids, masks and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.target import parse_target_config
from d2sd.convert.formats.convert import convert
from d2sd.convert.formats.read import read_drafter
from d2sd.convert.formats.shared_tensors import read_target_parts
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError
from d2sd.modeling.config import Family, RopeConfig
from tests.convert.formats.helpers import (
    extra,
    public_fields,
    reduced,
    speculators_fields,
    tiny_pair,
    write_foreign,
    write_tiny_target,
)
from tests.convert.helpers import hf_fields, set_key
from tests.tiny import tiny_decoder, tiny_drafter

DECODER, DRAFTER = tiny_pair()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def parse(family: Family, **rope: Any) -> RopeConfig:
    values = {key: value for key, value in hf_fields(tiny_decoder(family)).items() if not key.startswith("rope")}
    return parse_target_config(HFConfig(values | rope, "config.json")).body.rope


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("rope", [{}, {"rope_theta": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_only_llamas_first_configs_may_leave_theta_out(family: Family, rope: dict[str, Any]) -> None:
    assert parse("llama", **rope) == RopeConfig(10000.0)
    with pytest.raises(CheckpointError, match=r"missing(.|\n)*rope_theta\n  expected: float"):
        parse(family, **rope)


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_theta"),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": YARN}, "rope_scaling"),
        ({"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": YARN | {"factor": 8.0}}, "rope_scaling"),
    ],
)
def test_rope_that_is_written_twice_must_say_the_same(rope: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"twice, with different(.|\n)*config\.json: {key}\n"):
        parse("qwen3", **rope)


def test_rope_that_is_written_twice_may_say_the_same() -> None:
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    expected = RopeConfig(1e6, "yarn", 4.0, 128)
    assert parse("qwen3", rope_theta=1e6, rope_parameters=YARN | {"rope_theta": 1e6}, rope_scaling=old) == expected


#: A drafter's config of the DFlash layout, without what it cannot do without -> the message.
ZLAB: dict[str, tuple[dict[str, Any], str]] = {
    "a mask by its name alone": (
        {"dflash_config.mask_token_id": ..., "dflash_config.mask_token": "<|MASK|>"}, r"missing(.|\n)*mask_token_id",
    ),
    "no block size": ({"block_size": ...}, r"missing(.|\n)*block_size"),
    "no theta in the new place": (
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, r"missing(.|\n)*rope_theta",
    ),
    "no heads": ({"num_attention_heads": ...}, r"missing(.|\n)*num_attention_heads"),  # ModelOpt would take 32
    "no width": ({"intermediate_size": ...}, r"missing(.|\n)*intermediate_size"),  # and 22016
}  # fmt: skip
SPECULATORS: dict[str, tuple[dict[str, Any], str]] = {
    "no block size": (  # its own reader takes 8
        {"block_size": ..., "speculators_config": None}, r"missing(.|\n)*block_size",
    ),
    "no layer ids": ({"aux_hidden_state_layer_ids": ...}, r"missing(.|\n)*aux_hidden_state_layer_ids"),
    "no theta in the new place": (
        {"transformer_layer_config.rope_parameters": {"rope_type": "default"}}, r"missing(.|\n)*rope_theta",
    ),
    "windowed layers": (
        {"transformer_layer_config.layer_types": ["full_attention", "sliding_attention"]},
        r"transformer_layer_config: layer_types",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), ZLAB.values(), ids=ZLAB)
def test_nothing_is_guessed_in_the_dflash_layout(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fields = public_fields(DRAFTER)
    for key, value in changes.items():
        set_key(fields, key, value)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(write_foreign(tmp_path / "a", fields, DRAFTER.state_dict()))


@pytest.mark.parametrize(("changes", "message"), SPECULATORS.values(), ids=SPECULATORS)
def test_nothing_is_guessed_in_speculators(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fields = speculators_fields(DRAFTER, d2sd={"num_target_layers": 6})
    for key, value in changes.items():
        set_key(fields, key, value)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(write_foreign(tmp_path / "a", fields, DRAFTER.state_dict()))


def test_a_drafter_of_the_last_layer_is_not_written_as_a_speculator(tmp_path: Path) -> None:
    """The state of the last layer has no number there; z-lab's layout has one."""
    decoder, drafter = tiny_pair(ids=(0, 2, 5))
    target = write_tiny_target(tmp_path / "target", decoder)
    DFLASH.write(tmp_path / "a", drafter.config, drafter.state_dict())
    with pytest.raises(CheckpointError, match=r"last layer(.|\n)*/a\n(.|\n)*0 to 4"):
        convert(tmp_path / "a", "speculators", tmp_path / "b", target=target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "target"]
    convert(tmp_path / "a", "z-lab", tmp_path / "c", target=target)


@pytest.mark.parametrize(
    ("drafter", "key"),
    [
        (tiny_drafter(tiny_decoder(hidden=48, heads=6, layers=6, rope=DRAFTER.config.body.rope).config), "hidden_size"),
        (
            tiny_drafter(tiny_decoder(layers=6, rope=RopeConfig(5e5, "yarn", 4.0, 128)).config),
            "rope_theta and rope_scaling",  # ModelOpt can stretch a drafter alone, at export
        ),
    ],
    ids=["another width", "stretched alone"],
)
def test_a_drafter_of_another_target_is_refused_by_the_differing_key(tmp_path: Path, drafter: Any, key: str) -> None:
    DFLASH.write(tmp_path / "a", drafter.config, drafter.state_dict())
    read_drafter(tmp_path / "a")
    with pytest.raises(CheckpointError, match=rf"another target(.|\n)*{key}\n  found(.|\n)*expected"):
        read_drafter(tmp_path / "a", read_target_parts(write_tiny_target(tmp_path / "target", DECODER)))


def test_tensors_of_another_target_are_detected_row_by_row(tmp_path: Path) -> None:
    """The head of a reduced vocabulary holds its tokens' rows: one row off is another token's."""
    drafter = reduced(DRAFTER)
    copies = extra(DECODER, drafter)
    copies["lm_head.weight"] = copies["lm_head.weight"].roll(1, dims=0)
    folder = write_foreign(tmp_path / "a", speculators_fields(drafter), drafter.state_dict() | copies)
    with pytest.raises(CheckpointError, match=r"lm_head.weight\n  found: row 0 differs"):
        read_drafter(folder, read_target_parts(write_tiny_target(tmp_path / "target", DECODER)))
