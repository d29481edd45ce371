"""Config fields that are omitted or that two readers would interpret differently: filled, carried or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.offline import offline_transformers
from d2sd.convert.formats.convert import convert
from d2sd.convert.formats.read import read_drafter
from d2sd.convert.formats.shared_tensors import read_target_parts
from d2sd.convert.formats.speculators import QWEN3_DEFAULTS, config_fields, from_tensors, read_speculators, to_tensors
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError
from d2sd.modeling.config import Family, RopeConfig
from tests.convert.formats.helpers import IDS, extra, reduced, speculators_fields, tiny_pair, write_foreign
from tests.convert.helpers import hf_fields, write_project, write_target_dir
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


def test_a_drafter_of_the_last_layer_is_not_written_as_a_speculator(tmp_path: Path) -> None:
    """The state of the last layer has no number there; z-lab's layout has one."""
    decoder, drafter = tiny_pair(ids=(0, 2, 5))
    target = write_target_dir(tmp_path / "target", decoder)
    DFLASH.write(tmp_path / "a", drafter.config, drafter.state_dict())
    with pytest.raises(CheckpointError, match=r"last layer(.|\n)*/a\n(.|\n)*0 to 4"):
        convert(tmp_path / "a", "speculators", tmp_path / "b", target=target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "target"]
    convert(tmp_path / "a", "z-lab", tmp_path / "c", target=target)


def test_a_drafter_of_another_width_is_refused_where_the_target_is_named(tmp_path: Path) -> None:
    drafter = tiny_drafter(tiny_decoder(hidden=48, heads=6, layers=6, rope=DRAFTER.config.body.rope).config)
    DFLASH.write(tmp_path / "a", drafter.config, drafter.state_dict())
    read_drafter(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"another target(.|\n)*hidden_size\n  found(.|\n)*expected"):
        read_drafter(tmp_path / "a", read_target_parts(write_target_dir(tmp_path / "target", DECODER)))


LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0)
SCALED = RopeConfig(1e6, "yarn", 4.0, 32768, beta_fast=30.0, attention_factor=1.2)


def test_defaults_are_transformers_own() -> None:
    values: dict[str, Any] = offline_transformers().Qwen3Config().to_dict()
    values["rope_theta"] = values["rope_parameters"]["rope_theta"]
    assert {key: values[key] for key in QWEN3_DEFAULTS} == QWEN3_DEFAULTS


def test_a_body_saved_as_a_difference_from_them_is_filled() -> None:
    fields = speculators_fields(tiny_pair()[1])
    del fields["transformer_layer_config"]["rope_parameters"], fields["transformer_layer_config"]["rms_norm_eps"]
    config = read_speculators(HFConfig(fields, "config.json"), 6)
    assert config.body.rope == RopeConfig(10000.0)
    assert config.body.rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    "rope", [RopeConfig(1e4), RopeConfig(1e4, "linear", 2.0), LLAMA3, SCALED], ids=lambda r: r.kind
)
def test_what_is_written_is_read(rope: RopeConfig) -> None:
    config = tiny_drafter(tiny_decoder(rope=rope).config, role="variable_prefix").config
    fields = config_fields(config, torch.bfloat16, "somebody/target", ["LlamaForCausalLM"])
    assert read_speculators(HFConfig(json.loads(json.dumps(fields)), "config.json"), None) == config


def test_every_field_is_written() -> None:
    """With their defaults a reader would draft among 32000 tokens, from the anchor, or without a mask."""
    fields = config_fields(tiny_pair()[1].config, torch.bfloat16, "somebody/target", ["LlamaForCausalLM"])
    values = json.loads(json.dumps(fields))
    assert values["aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert (values["sample_from_anchor"], values["sliding_window_non_causal"]) == (False, False)
    assert (values["draft_vocab_size"], values["block_size"], values["mask_token_id"]) == (64, 4, 63)
    assert values["d2sd"] == {"num_target_layers": 6, "prefix_weight_base": None, "training_mode": "dflash"}
    assert values["speculators_config"]["verifier"] == {
        "architectures": ["LlamaForCausalLM"],
        "name_or_path": "somebody/target",
    }
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert set(QWEN3_DEFAULTS) - {"rope_theta"} <= values["transformer_layer_config"].keys()
    assert values["transformer_layer_config"]["rope_parameters"] == {"rope_theta": 500000.0, "rope_type": "default"}


def test_d2t_is_an_offset() -> None:
    tensors = to_tensors(IDS, 64)
    assert tensors["d2t"].tolist() == [0, 2, 15, 37, 58]
    assert tensors["t2d"].nonzero().flatten().tolist() == list(IDS)
    assert (tensors["t2d"].dtype, tensors["d2t"].dtype) == (torch.bool, torch.int64)
    assert from_tensors(tensors, 5, 64, "file") == IDS


@pytest.mark.parametrize("ids", [None, IDS], ids=["all tokens", "a part"])
def test_a_head_is_the_targets_rows_of_the_vocabulary(tmp_path: Path, ids: tuple[int, ...] | None) -> None:
    decoder, drafter = tiny_pair()
    drafter = drafter if ids is None else reduced(drafter)
    tensors = drafter.state_dict() | extra(decoder, drafter)
    if ids is None:
        tensors |= to_tensors(tuple(range(64)), 64)
    fields = speculators_fields(drafter, d2sd={"num_target_layers": 6})
    config = read_drafter(write_foreign(tmp_path / "s", fields, tensors)).config
    assert config.draft_vocabulary == ids
    assert ids or config == drafter.config


def test_a_bundle_is_a_target_and_the_verifier_is_its_target(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project").parent
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "manifest.json").touch()
    (project / "target").rename(bundle / "target")
    convert(project / "second", "speculators", tmp_path / "out", target=bundle)
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert values["speculators_config"]["verifier"]["name_or_path"] == str(bundle / "target")
    assert values["d2sd"]["training_mode"] == "vp_drafter"
