"""Files that are read and written again stay the same, in the bytes of our own writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from d2sd.convert.formats.convert import Writable, convert
from d2sd.convert.formats.read import read_drafter
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError
from d2sd.modeling.config import Role
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from tests.convert.formats.helpers import (
    draft_logits,
    extra,
    modelopt_fields,
    public_fields,
    reduced,
    speculators_fields,
    tiny_pair,
    write_foreign,
)
from tests.convert.helpers import tree_bytes, write_target_dir
from tests.tiny import random_tokens, tiny_decoder, tiny_drafter


def logits(decoder: Decoder, folder: Path) -> Tensor:
    tokens = random_tokens(decoder, 1, 12)[0]
    return draft_logits(decoder, DFLASH.load(folder, torch.float32), tokens[:11], int(tokens[11]))


@pytest.fixture
def decoder() -> Decoder:
    return tiny_pair()[0]


@pytest.fixture
def target(tmp_path: Path, decoder: Decoder) -> Path:
    return write_target_dir(tmp_path / "target", decoder)


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None], ids=["with metadata", "without"])
def test_a_published_z_lab_directory(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    """Remote code, token ids, an integer theta, fields left out: what is written is explicit, and ours."""
    drafter = tiny_pair()[1]
    source = write_foreign(tmp_path / "a", public_fields(drafter), drafter.state_dict(), metadata)
    assert convert(source, "z-lab", tmp_path / "b") == ("DFlash", [])
    DFLASH.write(tmp_path / "ours", drafter.config, drafter.state_dict())
    assert tree_bytes(tmp_path / "b") == tree_bytes(tmp_path / "ours")


@pytest.mark.parametrize("role", ["first", "variable_prefix"])
@pytest.mark.parametrize("vocabulary", [False, True], ids=["whole", "reduced"])
def test_our_own_z_lab_directory_also_through_speculators(
    tmp_path: Path, target: Path, role: Role, vocabulary: bool
) -> None:
    drafter = tiny_pair(role=role)[1]
    drafter = reduced(drafter) if vocabulary else drafter
    DFLASH.write(tmp_path / "a", drafter.config, drafter.state_dict())
    assert convert(tmp_path / "a", "z-lab", tmp_path / "b") == ("DFlash", [])
    convert(tmp_path / "a", "speculators", tmp_path / "c", target=target)
    convert(tmp_path / "c", "z-lab", tmp_path / "d", target=target)
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b") == tree_bytes(tmp_path / "d")
    assert DFLASH.read_config(tmp_path / "d").role == role


def test_speculators_have_no_scaled_embeddings(tmp_path: Path) -> None:
    gemma = tiny_decoder("gemma3_text", layers=4)
    target = write_target_dir(tmp_path / "target", gemma)
    drafter = tiny_drafter(gemma.config)
    DFLASH.write(tmp_path / "a", drafter.config, drafter.state_dict())
    told = r"this target scales them(.|\n)*gemma3_text(.|\n)*fix: convert it to z-lab"
    with pytest.raises(CheckpointError, match=told):
        convert(tmp_path / "a", "speculators", tmp_path / "c", target=target)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("vocabulary", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("copies", ["both", "head", "none"])
def test_a_speculators_directory(tmp_path: Path, decoder: Decoder, target: Path, vocabulary: bool, copies: str) -> None:
    """To 0.7 both copies were saved, from 0.8 the head of a reduced vocabulary alone."""
    drafter = reduced(tiny_pair()[1]) if vocabulary else tiny_pair()[1]
    kept = {"both": ("embed", "lm_head"), "head": ("lm_head",), "none": ()}[copies]
    more = {n: t for n, t in extra(decoder, drafter).items() if n.startswith(("t2d", "d2t", *kept))}
    source = write_foreign(
        tmp_path / "a", speculators_fields(drafter), {**drafter.state_dict(), **more}, {"format": "pt"}
    )
    found, _ = convert(source, "speculators", tmp_path / "b", target=target)
    assert found == "speculators"
    DFLASH.write(tmp_path / "ours", drafter.config, drafter.state_dict())
    convert(tmp_path / "ours", "speculators", tmp_path / "c", target=target)
    assert tree_bytes(tmp_path / "b") == tree_bytes(tmp_path / "c"), "with both copies, whatever the source has"


def write_as(folder: Path, form: str, decoder: Decoder, drafter: Drafter) -> Path:
    if form == "speculators":
        return write_foreign(folder, speculators_fields(drafter), drafter.state_dict() | extra(decoder, drafter))
    fields = modelopt_fields(drafter) if form == "modelopt" else public_fields(drafter)
    if form == "specforge":
        fields["dflash_config"] |= {"training_mode": "vp_drafter", "prefix_weight_base": 0.9}
    return write_foreign(folder, fields, drafter.state_dict())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("to", ["z-lab", "speculators"])
@pytest.mark.parametrize("form", ["z-lab", "modelopt", "specforge", "speculators"])
def test_every_format_becomes_ours_through_any_other(
    tmp_path: Path, decoder: Decoder, target: Path, form: str, to: Writable
) -> None:
    """The files that our own writer writes of the same drafter, whoever it comes from."""
    drafter = tiny_pair(role="variable_prefix" if form == "specforge" else "first")[1]
    DFLASH.write(tmp_path / "ours", drafter.config, drafter.state_dict())
    found, _ = convert(write_as(tmp_path / "a", form, decoder, drafter), to, tmp_path / "b", target=target)
    assert found == ("speculators" if form == "speculators" else "DFlash")
    convert(tmp_path / "b", "z-lab", tmp_path / "c", target=target)
    assert tree_bytes(tmp_path / "c") == tree_bytes(tmp_path / "ours")


def test_unsorted_ids_are_put_in_order_with_their_columns(tmp_path: Path, decoder: Decoder) -> None:
    drafter = tiny_pair(ids=(4, 0, 2))[1]
    source = write_foreign(tmp_path / "a", public_fields(drafter), drafter.state_dict())
    _, notes = convert(source, "z-lab", tmp_path / "b")
    assert any("[4, 0, 2] and the columns of fc.weight" in note for note in notes)
    assert DFLASH.read_config(tmp_path / "b").target_layer_ids == (0, 2, 4)
    # fc adds the same products in another order, seen in fp32's fifth digit; wrong columns differ in the first.
    torch.testing.assert_close(logits(decoder, tmp_path / "b"), logits(decoder, source), atol=1e-4, rtol=0)


def test_tensors_keep_their_type(tmp_path: Path) -> None:
    drafter = tiny_pair()[1]
    halves = {name: tensor.bfloat16() for name, tensor in drafter.state_dict().items()}
    source = write_foreign(tmp_path / "a", public_fields(drafter) | {"dtype": "bfloat16"}, halves)
    assert read_drafter(source).dtype == torch.bfloat16
    convert(source, "z-lab", tmp_path / "b")
    written = read_drafter(tmp_path / "b").tensors
    assert all(torch.equal(written[name], tensor) for name, tensor in halves.items())


def test_shards_become_one_file(tmp_path: Path) -> None:
    drafter = tiny_pair()[1]
    whole = drafter.state_dict()
    source = write_foreign(tmp_path / "a", public_fields(drafter), whole)
    halves = [list(whole)[::2], list(whole)[1::2]]
    (source / "model.safetensors").unlink()
    names = [f"model-{part}-of-2.safetensors" for part in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        write_foreign(tmp_path / name, {}, {key: whole[key] for key in half})
        (tmp_path / name / "model.safetensors").replace(source / name)
    index = {"weight_map": {key: name for name, half in zip(names, halves, strict=True) for key in half}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(source, "z-lab", tmp_path / "b")
    assert sorted(tree_bytes(tmp_path / "b")) == ["config.json", "model.safetensors"]
    for name, tensor in DFLASH.load(tmp_path / "b", torch.float32).state_dict().items():
        assert torch.equal(tensor, whole[name])


def test_code_and_pickles_stay_behind_and_are_named(tmp_path: Path) -> None:
    drafter = tiny_pair()[1]
    source = write_foreign(tmp_path / "a", public_fields(drafter), drafter.state_dict())
    for name in ("dflash.py", "training_state.pt"):
        (source / name).write_bytes(b"\x80raise SystemExit")
    _, notes = convert(source, "z-lab", tmp_path / "b")
    assert sorted(tree_bytes(tmp_path / "b")) == ["config.json", "model.safetensors"]
    assert "not converted: dflash.py, training_state.pt" in notes
    assert any(note.startswith("training_state.pt is a pickle and was not opened") for note in notes)
