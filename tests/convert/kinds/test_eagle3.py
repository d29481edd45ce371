"""An EAGLE-3 head on disk: the same bytes after a round trip, three projects' spellings, and refusals by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from d2sd.convert.checkpoint.quantization import Quantization
from d2sd.convert.kinds import DFLASH, KINDS, read_kind
from d2sd.convert.kinds.eagle3 import KIND as EAGLE3
from d2sd.errors import CheckpointError
from d2sd.modeling.config import RopeConfig
from d2sd.policies import NAMES, DrafterRole
from tests.convert.helpers import edit_json, edit_tensors, tree_bytes
from tests.tiny import in_fp8, tiny_decoder, tiny_eagle

TARGET = tiny_decoder("qwen3", layers=7)
IDS = (0, 5, 9, 33)
LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0)
HEAD = tiny_eagle(TARGET.config, draft_vocabulary=IDS)
#: Every key that projects write and that changes nothing here.
AUTHORS = {"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
AUTHORS |= {"initializer_range": 0.02, "torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": True}
MODELOPT = {"architectures": ["LlamaForCausalLMEagle3"], "pretraining_tp": 1, "mlp_bias": False, "attention_dropout": 0}
INSIDE: dict[str, Any] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
INSIDE |= {"next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    EAGLE3.write(tmp_path / "head", HEAD.config, HEAD.state_dict())
    return tmp_path / "head"


@pytest.mark.parametrize("rope", [RopeConfig(1e4), LLAMA3], ids=lambda r: r.kind)
@pytest.mark.parametrize("ids", [None, IDS])
def test_round_trip(tmp_path: Path, ids: tuple[int, ...] | None, rope: RopeConfig) -> None:
    head = tiny_eagle(TARGET.config, draft_vocabulary=ids, steps=5, rope=rope)
    EAGLE3.write(tmp_path / "a", head.config, head.state_dict())
    assert read_kind(tmp_path / "a") == "eagle3"
    again = KINDS["eagle3"].load(tmp_path / "a", torch.float32)
    assert again.config == head.config
    EAGLE3.copy(tmp_path / "a", tmp_path / "b", torch.float32)
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")
    assert EAGLE3.fingerprint(again) == EAGLE3.fingerprint(head)
    EAGLE3.check(again.config, TARGET.config, DrafterRole.FIRST, 4, tmp_path / "a")


def test_what_is_written_others_read(folder: Path) -> None:
    """SpecForge's names, with the maps of the draft vocabulary."""
    values, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    ids = list(HEAD.config.target_layer_ids)
    inside = {"eagle_aux_hidden_state_layer_ids": ids, "ttt_steps": 3, "use_aux_hidden_state": True}
    assert values["eagle_config"] == inside
    assert (values["num_hidden_layers"], values["draft_vocab_size"], values["vocab_size"]) == (1, 4, 64)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert (tensors["d2t"] + torch.arange(4)).tolist() == list(IDS)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == list(IDS)
    assert {"fc.weight", "norm.weight", "lm_head.weight", "midlayer.hidden_norm.weight"} < tensors.keys()


def as_written_by(project: str, folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors, values = load_file(file), json.loads((folder / "config.json").read_text())
    (folder / "draft_vocab.json").unlink()
    if project == "SpecForge":  # a copy of the embedding in some
        edit_tensors(file, **{"embed_tokens.weight": torch.ones(64, 32)})
    if project == "authors":  # heads of hidden_size / num_attention_heads, and no scaling of RoPE
        values = {key: value for key, value in values.items() if key not in ("head_dim", "rope_scaling")} | AUTHORS
    if project == "ModelOpt":  # ids in int32, and no marks
        names = [name for name in tensors if name.startswith("midlayer.")]
        edit_tensors(file, **{name.replace("midlayer.", "layers.0."): tensors[name] for name in names})
        edit_tensors(file, **dict.fromkeys(names), t2d=None, d2t=tensors["d2t"].int())
        values |= MODELOPT | {"eagle_config": values["eagle_config"] | INSIDE}
    del values["eagle_config"]["ttt_steps"]
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("project", ["SpecForge", "authors", "ModelOpt"])
def test_three_layouts_mean_the_same(folder: Path, project: str) -> None:
    as_written_by(project, folder)
    assert read_kind(folder) == "eagle3"
    head = EAGLE3.load(folder, torch.float32)
    assert head.config.draft_vocabulary == IDS
    assert head.config.drafts == 7
    assert EAGLE3.check_tensors(folder, head.config) is None
    for name, tensor in HEAD.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor)


def test_a_geometry_is_read_without_tensors(folder: Path) -> None:
    """A plan has the size of the head, and none of its ids."""
    (folder / "model.safetensors").unlink()
    config = EAGLE3.read_config(folder)
    assert EAGLE3.shapes(config) == EAGLE3.shapes(HEAD.config)
    edit_json(folder / "config.json", "draft_vocab_size", 1)
    with pytest.raises(CheckpointError, match=r"too small(.|\n)*draft_vocab_size"):
        EAGLE3.read_config(folder)


def test_a_head_of_the_whole_vocabulary_needs_no_map(folder: Path) -> None:
    edit_json(folder / "config.json", "draft_vocab_size", ...)
    edit_tensors(folder / "model.safetensors", d2t=None, t2d=None, **{"lm_head.weight": torch.ones(64, 32)})
    head = EAGLE3.load(folder, torch.float32)
    assert head.config.draft_vocabulary is None


WRONG: dict[str, tuple[str, Any, str, str]] = {
    "no layers": ("eagle_config.eagle_aux_hidden_state_layer_ids", ..., "does not list", "hidden_state_layer_ids"),
    "no block": ("eagle_config", ..., "does not list", "eagle_aux_hidden_state_layer_ids"),
    "layers twice": ("eagle_config.eagle_aux_hidden_state_layer_ids", [1, 1], "wrong", "layer_ids"),
    "layers in another order": ("eagle_config.eagle_aux_hidden_state_layer_ids", [3, 1], "wrong", "layer_ids"),
    "last features alone": ("eagle_config.use_aux_hidden_state", False, "not supported", "use_aux_hidden_state"),
    "no norm": ("eagle_config.use_input_layernorm_in_first_layer", False, "not supported", "in_first_layer"),
    "parallel": ("eagle_config.parallel_draft_step", 4, "not supported", "parallel_draft_step"),
    "projected": ("eagle_config.eh_proj_before_attn", True, "not supported", "eh_proj_before_attn"),
    "no steps": ("eagle_config.ttt_steps", 0, "out of range", "ttt_steps"),
    "unknown inside": ("eagle_config.gate", 1, "unknown", "gate"),
    "unknown": ("gate", 1, "unknown", "gate"),
    "steps above": ("ttt_steps", 2, "unknown", "ttt_steps"),
    "layers above": ("eagle_aux_hidden_state_layer_ids", [0, 1], "unknown", "layer_ids"),
    "RoPE inside": ("eagle_config.rope_theta", 1e6, "unknown", "rope_theta"),
    "deeper": ("num_hidden_layers", 2, "not supported", "num_hidden_layers"),
    "norms of features": ("fc_norm", True, "not supported", "fc_norm"),
    "normed hidden states": ("norm_output", True, "not supported", "norm_output"),
    "another residual": ("norm_before_residual", True, "not supported", "norm_before_residual"),
    "another width": ("target_hidden_size", 64, "not supported", "target_hidden_size"),
    "half a group": ("num_key_value_heads", 3, "not a multiple", "num_key_value_heads"),
    "another body": ("model_type", "deepseek_v3", "not supported", "model_type"),
    "another class": ("architectures", ["Eagle3DeepSeekV3ForCausalLM"], "not supported", "architectures"),
    "more rows": ("draft_vocab_size", 65, "out of range", "draft_vocab_size"),
    "fewer rows": ("draft_vocab_size", 3, "ids are not known", "d2t"),
}


@pytest.mark.parametrize(("key", "value", "what", "where"), WRONG.values(), ids=WRONG)
def test_a_config_that_is_wrong(folder: Path, key: str, value: Any, what: str, where: str) -> None:
    edit_json(folder / "config.json", key, value)
    with pytest.raises(CheckpointError, match=what) as caught:
        EAGLE3.read_config(folder)
    assert str(caught.value.where).endswith(where)
    assert caught.value.expected is not None


MAPS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no map": ({"d2t": None}, "ids are not known", "d2t"),
    "numbers that are none": ({"d2t": torch.ones(4)}, "ids are not known", "d2t"),
    "ids outside": ({"d2t": torch.tensor([0, 0, 0, 64])}, "cannot be in", r"d2t\[3\]"),
    "ids out of order": ({"d2t": torch.tensor([5, 0, 0, 3])}, "cannot be in", r"d2t\[1\]"),
}


@pytest.mark.parametrize(("changes", "what", "where"), MAPS.values(), ids=MAPS)
def test_maps_that_are_wrong(folder: Path, changes: dict[str, Any], what: str, where: str) -> None:
    edit_tensors(folder / "model.safetensors", **changes)
    with pytest.raises(CheckpointError, match=rf"{what}(.|\n)*{where}"):
        EAGLE3.read_config(folder)


def test_tensors_that_are_wrong(folder: Path) -> None:
    file = folder / "model.safetensors"
    edit_tensors(file, fc_norm=torch.ones(2))
    with pytest.raises(CheckpointError, match="unknown fc_norm"):
        EAGLE3.check_tensors(folder, HEAD.config)
    edit_tensors(file, fc_norm=None, **{"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"missing draft_head\.weight"):
        EAGLE3.load(folder, torch.float32)


def test_a_head_for_another_place_or_target(folder: Path) -> None:
    def refused(what: str, target: Any = TARGET.config, role: DrafterRole = DrafterRole.FIRST) -> None:
        with pytest.raises(CheckpointError, match=what):
            EAGLE3.check(HEAD.config, target, role, 4, folder)

    refused("cannot be a second drafter", role=DrafterRole.SECOND)
    refused(r"another target(.|\n)*hidden_size", tiny_decoder("qwen3", layers=7, hidden=16).config)
    refused(r"another target(.|\n)*vocab_size", tiny_decoder("qwen3", layers=7, vocab=65).config)
    refused(r"another target(.|\n)*eagle_aux_hidden_state_layer_ids", tiny_decoder("qwen3", layers=5).config)
    edit_json(folder / "config.json", "draft_vocab_size", 5)
    refused(r"trained for its draft vocabulary(.|\n)*remove drafters\.vocabulary")


def test_its_policies_are_those_of_a_first_drafter_alone() -> None:
    refused = {name for name in NAMES if HEAD.config.refusal(name)}
    assert refused == {"d2sd", "flex_parallel"}


def test_fp8_is_of_all_layers_but_its_head(tmp_path: Path) -> None:
    names = EAGLE3.fp8_layers(HEAD.config)
    assert len(names) == 8
    narrow = in_fp8(HEAD, names)
    described = Quantization(EAGLE3.unquantized, kv=False, producer=("modelopt", "1"))
    EAGLE3.write(tmp_path / "a", HEAD.config, narrow.state_dict(), described)
    assert EAGLE3.check_tensors(tmp_path / "a", EAGLE3.read_config(tmp_path / "a")) == described
    EAGLE3.copy(tmp_path / "a", tmp_path / "b", torch.float32)
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")


def test_it_is_not_a_dflash_drafter(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="EAGLE-3") as caught:
        DFLASH.read_config(folder)
    assert caught.value.fix is not None
    assert "name it as drafters.first" in caught.value.fix
