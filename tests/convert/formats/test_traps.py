"""Every wrong input that others read in silence, named: file, key or tensor, and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.convert.formats.convert import convert
from d2sd.convert.formats.read import read_drafter
from d2sd.convert.formats.shared_tensors import read_target_parts
from d2sd.convert.kinds import DFLASH
from d2sd.errors import BuildError, CheckpointError
from d2sd.modeling.config import RopeConfig
from d2sd.policies import DrafterRole
from tests.convert.formats.helpers import extra, public_fields, reduced, speculators_fields, tiny_pair, write_foreign
from tests.convert.helpers import edit_json, edit_tensors, write_target_dir
from tests.tiny import tiny_decoder

DECODER, DRAFTER = tiny_pair()


@pytest.fixture
def zlab(tmp_path: Path) -> Path:
    return write_foreign(tmp_path / "zlab", public_fields(DRAFTER), DRAFTER.state_dict())


@pytest.fixture
def speculators(tmp_path: Path) -> Path:
    tensors = DRAFTER.state_dict() | extra(DECODER, reduced(DRAFTER))
    return write_foreign(tmp_path / "speculators", speculators_fields(reduced(DRAFTER)), tensors)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_dir(tmp_path_factory.mktemp("target") / "t", DECODER)


#: Keys of a DFlash layout -> what the message calls it; test_unsupported.py has the others.
FOREIGN: dict[str, tuple[str, Any]] = {
    "drafter with a projector": ("dflash_config.projector_type", "domino"),
    "EAGLE-3 drafter": ("architectures", ["LlamaForCausalLMEagle3"]),
    "Laguna drafter": ("architectures", ["DFlashLagunaForCausalLM"]),
}
#: A config of the DFlash layout that cannot be right -> pattern of the message.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"dflash_config.secret": 1}, r"unknown(.|\n)*dflash_config: secret"),
    "no layer ids": ({"dflash_config.target_layer_ids": ...}, r"target_layer_ids(.|\n)*then use \[1, 3\]"),
    "an id twice": ({"dflash_config.target_layer_ids": [0, 2, 2]}, r"target_layer_ids\n  found: \[0, 2, 2\]"),
    "an id too high": ({"dflash_config.target_layer_ids": [0, 2, 6]}, r"target_layer_ids(.|\n)*0 to 5"),
    "the embedding": ({"dflash_config.target_layer_ids": [-1, 2, 4]}, r"target_layer_ids(.|\n)*0 to 5"),
    "no mask": ({"dflash_config.mask_token_id": ...}, r"missing(.|\n)*mask_token_id"),
    "a mask outside": ({"dflash_config.mask_token_id": 64}, r"mask_token_id\n  found: 64\n  expected: 0 to 63"),
    "a mask by its name alone": (
        {"dflash_config.mask_token_id": ..., "dflash_config.mask_token": "<|MASK|>"},
        r"missing(.|\n)*mask_token_id",
    ),
    "no block size": ({"block_size": ...}, r"missing(.|\n)*block_size"),
    "no theta in the new place": (
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}},
        r"missing(.|\n)*theta",
    ),
    "no heads": ({"num_attention_heads": ...}, r"missing(.|\n)*num_attention_heads"),  # ModelOpt would take 32
    "no width": ({"intermediate_size": ...}, r"missing(.|\n)*intermediate_size"),  # and 22016
    "two block sizes": ({"dflash_config.block_size": 8}, r"block_size is given twice(.|\n)*found: 8\n  expected: 4"),
    "two depths": ({"dflash_config.num_target_layers": 7}, r"num_target_layers is given twice"),
    "two thetas": ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_theta is given twice(.|\n)*10000.0, as"),
    "no theta": ({"rope_theta": ...}, r"missing(.|\n)*rope_theta"),
    "no depth": ({"num_target_layers": ...}, r"missing(.|\n)*num_target_layers"),
    "another body": ({"model_type": "llama"}, r"model_type\n  found: \"llama\""),
    "another architecture": ({"architectures": ["Whatever"]}, r"architectures\n  found: \[\"Whatever\"\]"),
    "no format": ({"architectures": ["LlamaForCausalLM"], "dflash_config": ...}, r"recognised(.|\n)*LlamaForCausalLM"),
    "another speculator": ({"speculators_model_type": "eagle3"}, r"speculators_model_type\n  found: \"eagle3\""),
    "an unknown training": ({"dflash_config.training_mode": "cfu"}, r"training_mode(.|\n)*vp_drafter"),
    "a base without its role": ({"dflash_config.prefix_weight_base": 0.9}, r"prefix_weight_base(.|\n)*--role"),
    "a base beside another role": (
        {"dflash_config.prefix_weight_base": 0.9, "dflash_config.training_mode": "dflash"},
        r"prefix_weight_base",
    ),
}


def edit(folder: Path, changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        edit_json(folder / "config.json", key, value)


@pytest.mark.parametrize("name", FOREIGN)
def test_another_model_is_called_by_its_name(zlab: Path, name: str) -> None:
    """Also by what a recipe reads with."""
    key, value = FOREIGN[name]
    edit(zlab, {key: value})
    for read in (read_drafter, DFLASH.read_config):
        with pytest.raises(CheckpointError, match=rf"{name}(.|\n)*config\.json: .*{key.rpartition('.')[2]}\n"):
            read(zlab)


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_config_is_named(zlab: Path, changes: dict[str, Any], message: str) -> None:
    edit(zlab, changes)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(zlab)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("hf_quant_config.json", "quantized checkpoint"),
        ("quantize_config.json", "quantized checkpoint"),
        ("mask_embedding.pt", "mask embedding is a pickle"),
    ],
)
def test_what_lies_beside_the_config_counts(zlab: Path, file: str, message: str) -> None:
    (zlab / file).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{message}(.|\n)*{file}"):
        read_drafter(zlab)


TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "its own head": ({"lm_head__weight": torch.ones(64, 32)}, "unknown lm_head.weight"),
    "its own embedding": ({"embed_tokens__weight": torch.ones(64, 32)}, "unknown embed_tokens.weight"),
    "a tensor missing": ({"norm__weight": None}, "missing norm.weight"),
    "fused projections": ({"layers__0__self_attn__qkv_proj__weight": torch.ones(64, 32)}, "unknown .*qkv_proj"),
    "scales": ({"fc__weight_scale": torch.ones(())}, "unknown fc.weight_scale"),
    "columns of other ids": (
        {"fc__weight": torch.ones(32, 64)},
        r"fc.weight\n  found: \[32, 64\]\n  expected: \[32, 9",
    ),
    "NaN": ({"norm__weight": torch.full((32,), torch.nan)}, "NaN(.|\n)*norm.weight"),
    "several types": ({"norm__weight": torch.ones(32).bfloat16()}, "different types(.|\n)*BF16, F32"),
    "FP8 weights": ({"norm__weight": torch.ones(32).to(torch.float8_e4m3fn)}, "norm.weight\n  found: F8_E4M3"),
}


@pytest.mark.parametrize(("changes", "message"), TENSORS.values(), ids=TENSORS)
def test_wrong_tensors_are_named(zlab: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    edit_tensors(zlab / "model.safetensors", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(zlab)


def test_pickled_weights_are_never_opened(zlab: Path) -> None:
    (zlab / "model.safetensors").rename(zlab / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"never opened(.|\n)*pytorch_model.bin"):
        read_drafter(zlab)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_theta": 10000.0}, "rope_theta and rope_scaling"),
        (  # ModelOpt can stretch a drafter alone, at export
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            "rope_theta and rope_scaling",
        ),
        ({"num_target_layers": 7}, "num_target_layers"),
        ({"vocab_size": 65}, "vocab_size"),
    ],
)
def test_a_drafter_of_another_target_is_refused_where_the_target_is_named(
    zlab: Path, target: Path, changes: dict[str, Any], key: str
) -> None:
    edit(zlab, changes)
    with pytest.raises(CheckpointError, match=rf"another target(.|\n)*{key}(.|\n)*expected"):
        read_drafter(zlab, read_target_parts(target))


SPECULATORS: dict[str, tuple[dict[str, Any], str]] = {
    "the embedding as a layer": ({"aux_hidden_state_layer_ids": [0, 3, 5]}, "aux_hidden_state_layer_ids(.|\n)*1 to 5"),
    "the last layer": ({"aux_hidden_state_layer_ids": [1, 3, 6]}, "aux_hidden_state_layer_ids(.|\n)*1 to 5"),
    "features of another width": ({"target_hidden_size": 64}, "target_hidden_size\n  found: 64"),
    "a window of no layer": (
        {"transformer_layer_config.use_sliding_window": True},
        "says of no layer(.|\n)*use_sliding_window",
    ),
    "no mask": ({"mask_token_id": None}, "missing(.|\n)*mask_token_id"),
    "no block size": ({"block_size": ..., "speculators_config": None}, "missing(.|\n)*block_size"),  # it takes 8
    "no layer ids": ({"aux_hidden_state_layer_ids": ...}, "missing(.|\n)*aux_hidden_state_layer_ids"),
    "no theta": ({"transformer_layer_config.rope_parameters": {"rope_type": "default"}}, "missing(.|\n)*rope_theta"),
    "windowed layers": (
        {"transformer_layer_config.layer_types": ["full_attention", "sliding_attention"]},
        r"contradicts layer_types(.|\n)*transformer_layer_config: use_sliding_window",
    ),
    "no vocabulary": ({"draft_vocab_size": ...}, "missing(.|\n)*draft_vocab_size"),
    "another vocabulary": ({"draft_vocab_size": 6}, r"wrong shape(.|\n)*lm_head.weight(.|\n)*\[6, 32\]"),
    "more drafts than slots": (
        {"speculators_config.proposal_methods": [{"speculative_tokens": 4}]},
        "proposal_methods(.|\n)*1 to 3",
    ),
    "another algorithm": ({"speculators_config.algorithm": "eagle3"}, "algorithm\n"),
    "another target": ({"d2sd": {"num_target_layers": 7}}, "another target(.|\n)*d2sd: num_target_layers"),
    "unknown key": ({"transformer_layer_config.secret": 1}, "unknown(.|\n)*transformer_layer_config: secret"),
}


@pytest.mark.parametrize(("changes", "message"), SPECULATORS.values(), ids=SPECULATORS)
def test_a_wrong_speculators_config_is_named(
    speculators: Path, target: Path, changes: dict[str, Any], message: str
) -> None:
    edit(speculators, changes)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(speculators, read_target_parts(target))


OFFSETS = torch.tensor([0, 2, 15, 37, 58])  # of IDS 0, 3, 17, 40, 62
MASK_AMONG = torch.zeros(64, dtype=torch.bool).index_fill(0, torch.tensor([0, 3, 17, 40, 63]), True)
VOCABULARY: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "ids for offsets": ({"d2t": torch.tensor([0, 3, 17, 40, 62])}, r"not offsets(.|\n)*d2t(.|\n)*\[0, 2, 15, 37, 58\]"),
    "d2t of other tokens": ({"d2t": OFFSETS + torch.tensor([0, 0, 1, 0, 0])}, r"d2t\[2\]\n  found: target token 18"),
    "t2d of more tokens": ({"t2d": torch.ones(64, dtype=torch.bool)}, r"t2d\n  found: 64\n  expected: 5"),
    "no t2d": ({"t2d": None}, "needs both(.|\n)*t2d among"),
    "no vocabulary": ({"t2d": None, "d2t": None}, "needs both(.|\n)*draft_vocab_size\n  found: 5"),
    "the mask": ({"t2d": MASK_AMONG, "d2t": OFFSETS + torch.tensor([0, 0, 0, 0, 1])}, r"d2t\[4\]\n  found: 63"),
    "t2d of integers": ({"t2d": torch.zeros(64, dtype=torch.int64)}, r"t2d\n  found: I64 \[64\]\n  expected: BOOL"),
    "a trained head": ({"lm_head__weight": torch.ones(5, 32)}, "lm_head.weight\n  found: row 0 differs"),
    "a trained embedding": (
        {"embed_tokens__weight": torch.ones(64, 32)},
        "embed_tokens.weight\n  found: row 0 differs",
    ),
    "its training's head": ({"verifier_lm_head__weight": torch.ones(5, 32)}, "unknown verifier_lm_head.weight"),
}


@pytest.mark.parametrize(("changes", "message"), VOCABULARY.values(), ids=VOCABULARY)
def test_wrong_tensors_of_a_speculators_checkpoint_are_named(
    speculators: Path, target: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    edit_tensors(speculators / "model.safetensors", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(speculators, read_target_parts(target))


def test_a_speculators_checkpoint_needs_its_target(speculators: Path, zlab: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"number of target layers(.|\n)*--target"):
        read_drafter(speculators)
    edit(speculators, {"d2sd": {"num_target_layers": 6}})
    assert any("dropped unchecked" in note for note in read_drafter(speculators).notes)
    with pytest.raises(CheckpointError, match=r"copies of the target(.|\n)*--target"):
        convert(zlab, "speculators", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["speculators", "zlab"]


def test_a_second_drafter_that_does_not_say_so_is_refused_unless_declared(zlab: Path) -> None:
    for declared, role in ((None, "first"), ("variable_prefix", "variable_prefix")):
        assert DFLASH.read_config(zlab, declared).role == role
    with pytest.raises(CheckpointError, match=r"training_mode(.|\n)*--role variable_prefix"):
        DFLASH.check(DFLASH.read_config(zlab), DECODER.config, DrafterRole.SECOND, 4, zlab)
    edit(zlab, {"dflash_config.training_mode": "dflash"})
    with pytest.raises(CheckpointError, match=r"declared(.|\n)*training_mode"):
        DFLASH.read_config(zlab, "variable_prefix")


@pytest.mark.parametrize(
    ("key", "value", "role"),
    [
        ("training_mode", "vp_drafter", "variable_prefix"),
        ("loss_type", "vp_drafter", "variable_prefix"),
        ("loss_type", "dpace", "first"),
    ],
)
def test_specforges_markers(zlab: Path, key: str, value: str, role: str) -> None:
    edit(zlab, {f"dflash_config.{key}": value, "architectures": ["Qwen3ForCausalLM"]})
    drafter = read_drafter(zlab)
    assert (drafter.format, drafter.config.role) == ("DFlash", role)


def test_a_recipe_error_says_to_sort_and_to_convert(zlab: Path, speculators: Path) -> None:
    edit(zlab, {"dflash_config.target_layer_ids": [4, 0, 2]})
    with pytest.raises(CheckpointError, match=r"\[4, 0, 2\]\n  expected: \[0, 2, 4\]\n  fix: d2sd convert"):
        DFLASH.check(DFLASH.read_config(zlab), DECODER.config, DrafterRole.FIRST, 4, zlab)
    with pytest.raises(CheckpointError, match=r"speculators checkpoint(.|\n)*d2sd convert"):
        DFLASH.read_config(speculators)


def test_a_target_must_have_what_drafters_borrow(tmp_path: Path) -> None:
    folder = write_target_dir(tmp_path / "t", tiny_decoder(rope=RopeConfig(1e4), tie=False))
    edit_tensors(folder / "model.safetensors", lm_head__weight=None)
    with pytest.raises(CheckpointError, match=r"lm_head.weight\n  found: no such tensor"):
        read_target_parts(folder)


def test_what_fails_leaves_nothing(zlab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("d2sd.convert.checkpoint.weights.write_tensors", full)
    with pytest.raises(BuildError, match="filled up"):
        convert(zlab, "z-lab", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["zlab"]
