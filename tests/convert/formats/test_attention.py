"""Drafters whose layers have windows, causal blocks or sinks, or that embed masks themselves: what each dialect says.

States are compared with a forward pass that is written from the equations (tests/modeling/loops.py).
Shape letters: G block size, E hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.formats.convert import convert
from d2sd.convert.formats.read import read_drafter
from d2sd.convert.formats.speculators import read_speculators
from d2sd.convert.kinds import DFLASH
from d2sd.convert.kinds.dflash import read_layout
from d2sd.errors import CheckpointError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import CommittedRows, Rows
from d2sd.modeling.where import Where
from tests.convert.formats.helpers import public_fields, speculators_fields, tiny_pair, write_foreign
from tests.convert.helpers import tree_bytes, write_target_dir
from tests.modeling.loops import draft
from tests.tiny import pool_for, random_tokens

WINDOW = 6
SLIDING, FULL = "sliding_attention", "full_attention"
DECODER, DRAFTER = tiny_pair()
Views = tuple[tuple[int | None, bool], tuple[int | None, bool]]


def with_keys(fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other keys; `a.b` is key b of part a."""
    made = {key: dict(value) if isinstance(value, dict) else value for key, value in fields.items()}
    for key, value in changes.items():
        part, _, name = key.rpartition(".")
        (made[part] if part else made)[name] = value
    return made


#: Where a config comes from -> its keys, and window and causality of its two layers.
DIALECTS: dict[str, tuple[dict[str, Any], Views]] = {
    "z-lab, windows": (
        {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW, "use_sliding_window": True},
        ((WINDOW, True), (None, False)),
    ),
    "z-lab, not causal": (
        {"layer_types": [SLIDING, SLIDING], "sliding_window": WINDOW, "use_sliding_window": True, "is_causal": False},
        ((WINDOW, False), (WINDOW, False)),
    ),
    "ModelOpt, windows": (
        {"dflash_config.use_swa": True, "dflash_config.swa_window_size": WINDOW, "dflash_config.causal": False,
         "sliding_window": WINDOW},
        ((WINDOW, False), (WINDOW, False)),
    ),
    "MiMo": (
        {"dflash_config.use_swa": True, "dflash_config.swa_window_size": WINDOW},
        ((WINDOW, False), (WINDOW, False)),
    ),
    "JetSpec": ({"dflash_config.causal_head": True, "target_hidden_size": 32}, ((None, True), (None, True))),
    "causal in all layers": ({"is_causal": True}, ((None, True), (None, True))),
    "causal inside": ({"dflash_config.causal": True}, ((None, True), (None, True))),
    "plain": ({"use_sliding_window": False, "sliding_window": 4096}, ((None, False), (None, False))),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "views"), DIALECTS.values(), ids=DIALECTS)
def test_what_rows_see(keys: dict[str, Any], views: Views) -> None:
    config = read_layout(HFConfig(with_keys(public_fields(DRAFTER), keys), "config.json"))
    assert config.body.views == views


@pytest.mark.parametrize("non_causal", [False, True, None])
def test_what_rows_see_in_speculators(non_causal: bool | None) -> None:
    """Windowed layers are causal unless a key says otherwise; the others never are."""
    keys = {
        "transformer_layer_config.layer_types": [SLIDING, FULL],
        "transformer_layer_config.sliding_window": WINDOW,
        "transformer_layer_config.use_sliding_window": True,
        "sliding_window_non_causal": non_causal,
    }
    config = read_speculators(HFConfig(with_keys(speculators_fields(DRAFTER), keys), "config.json"), 6)
    assert config.body.views == ((WINDOW, not non_causal), (None, False))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a window of no layer": ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
    "no layer types": ({"layer_types": None, "sliding_window": 64, "use_sliding_window": None}, "sliding_window"),
    "no width": ({"layer_types": [SLIDING] * 2, "use_sliding_window": True}, "sliding_window"),
    "not used": ({"layer_types": [SLIDING] * 2, "sliding_window": 64}, "use_sliding_window"),
    "another kind": ({"layer_types": [FULL, "chunked_attention"]}, "layer_types"),
    "too few": ({"layer_types": [FULL]}, "layer_types"),
    "a width alone": ({"dflash_config.swa_window_size": 64}, "swa_window_size"),
    "no width inside": ({"dflash_config.use_swa": True}, "swa_window_size"),
    "two widths": (
        {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 64, "sliding_window": 32},
        "swa_window_size",
    ),
    "two answers": ({"is_causal": False, "dflash_config.causal": True}, "causal"),
    "neighbours turned": ({"is_neox_style": False}, "is_neox_style"),
    "sinks of some layers": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 64, "use_sliding_window": True,
         "add_swa_attention_sink_bias": True},
        "add_swa_attention_sink_bias",
    ),
    "a window inside a block": (
        {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 3},
        "sliding_window",
    ),
    "two masks": ({"mask_token_id": 5}, "mask_token_id"),
    "another width of the target": ({"target_hidden_size": 48}, "target_hidden_size"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "key"), WRONG.values(), ids=WRONG)
def test_what_readers_would_guess_is_refused(keys: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: (dflash_config: )?{key}\n"):
        read_layout(HFConfig(with_keys(public_fields(DRAFTER), keys), "config.json"))


def served(decoder: Decoder, drafter: Drafter, context: Tensor, block: Tensor) -> Tensor:
    """Hidden states [G, E] of the block, as the runtime computes them: context in pages, the block's rows behind it."""
    config = drafter.config
    features = decoder.full_pass(context[None], aux_layer_ids=config.target_layer_ids).features
    pool, table = pool_for(config.body, 1, len(context) + len(block))
    positions = torch.arange(len(context))[None]
    keep = torch.ones_like(positions, dtype=torch.bool)
    committed = CommittedRows(features, (table,), positions, keep, pool.page_size)
    attn_mask = torch.ones(1, len(block), len(block), dtype=torch.bool)
    where = Where(table, torch.tensor([len(context)]))
    rows = Rows(len(context) + torch.arange(len(block))[None], attn_mask, where)
    return drafter.inject_and_draft(committed, block[None], decoder.embed_tokens, rows, pool)[0]


def checkpoint(
    folder: Path, keys: Mapping[str, Any], *, sinks: bool = False, mask: bool = False, renamed: bool = False
) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """A folder as published, its tensors under z-lab's names, and its config."""
    fields, tensors = with_keys(public_fields(DRAFTER), keys), dict(DRAFTER.state_dict())
    generator = torch.Generator().manual_seed(5)
    if sinks:
        for layer in range(2):
            tensors[f"layers.{layer}.self_attn.attention_sink_bias"] = torch.randn(4, generator=generator)
    if mask:
        tensors["mask_embedding"] = torch.randn(32, generator=generator)
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc.", "layers.0.": "midlayer."}
    stored = dict(tensors)
    for ours, theirs in names.items() if renamed else ():
        stored = {(theirs + n.removeprefix(ours) if n.startswith(ours) else n): x for n, x in stored.items()}
    return write_foreign(folder, fields, stored), tensors, fields


CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, bool]]] = {
    "windows": ("z-lab, windows", {}, {}),
    "windows that are not causal": ("z-lab, not causal", {}, {}),
    "ModelOpt's windows": ("ModelOpt, windows", {}, {}),
    "a causal block": ("JetSpec", {}, {}),
    "MiMo": ("MiMo", {"dflash_config.attention_sink_bias": True}, {"sinks": True, "mask": True}),
    "sinks": ("plain", {"attention_sink_bias": True}, {"sinks": True}),
    "a mask embedding": ("plain", {}, {"mask": True}),
    "other names": ("plain", {}, {"renamed": True}),
    "pairs of neighbours": ("plain", {"rope_is_neox_style": False}, {}),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_those_of_the_equations(tmp_path: Path, name: str) -> None:
    """In plain layers and in compiled ones; and a written folder says the same again, byte for byte."""
    dialect, more, options = CHECKPOINTS[name]
    keys, views = DIALECTS[dialect]
    folder, tensors, fields = checkpoint(tmp_path / "a", {**keys, **more}, **options)
    tokens = random_tokens(DECODER, 1, 12)[0]
    context = tokens[:11]
    block = torch.tensor([int(tokens[11]), *[DRAFTER.config.mask_token_id] * 3])
    embedded = DECODER.embed_tokens(block)
    if options.get("mask"):
        embedded[1:] = tensors["mask_embedding"]
    features = DECODER.full_pass(context[None], aux_layer_ids=DRAFTER.config.target_layer_ids).features[0]
    weights = {key: tensor.double().numpy() for key, tensor in tensors.items()}
    states = draft(
        weights,
        DRAFTER.config.body,
        list(features.double().numpy()),
        [*range(11)],
        list(embedded.double().numpy()),
        [*range(11, 15)],
        views=views,
        neighbours=fields.get("rope_is_neox_style") is False,
    )
    expected = torch.from_numpy(np.array(states)).float()
    convert(folder, "z-lab", tmp_path / "b")
    convert(tmp_path / "b", "z-lab", tmp_path / "c")
    assert tree_bytes(tmp_path / "b") == tree_bytes(tmp_path / "c")
    for one in (folder, tmp_path / "b")["rope_is_neox_style" in more :]:  # which is read where it is converted alone
        drafter = DFLASH.load(one, torch.float32)
        assert drafter.config.body.views == views
        torch.testing.assert_close(served(DECODER, drafter, context, block), expected, atol=1e-5, rtol=1e-5)
    plain = served(DECODER, DRAFTER, context, block)
    assert name == "other names" or not torch.allclose(plain, expected, atol=1e-2)


@pytest.mark.parametrize("non_causal", [False, True])
def test_windows_through_speculators(tmp_path: Path, non_causal: bool) -> None:
    keys: dict[str, Any] = {"layer_types": [SLIDING, SLIDING if non_causal else FULL], "sliding_window": WINDOW}
    keys |= {"use_sliding_window": True} | ({"is_causal": False} if non_causal else {})
    folder, *_ = checkpoint(tmp_path / "a", keys)
    target = write_target_dir(tmp_path / "target", DECODER)
    convert(folder, "z-lab", tmp_path / "b")
    convert(tmp_path / "b", "speculators", tmp_path / "c", target=target)
    convert(tmp_path / "c", "z-lab", tmp_path / "d", target=target)
    assert tree_bytes(tmp_path / "b") == tree_bytes(tmp_path / "d")


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        (DIALECTS["JetSpec"][0], {}, "without a window are causal"),
        ({"attention_sink_bias": True}, {"sinks": True}, "attention sinks"),
        ({}, {"mask": True}, "mask embedding"),
    ],
)
def test_what_speculators_cannot_say(
    tmp_path: Path, keys: dict[str, Any], options: dict[str, bool], message: str
) -> None:
    folder, *_ = checkpoint(tmp_path / "a", keys, **options)
    target = write_target_dir(tmp_path / "target", DECODER)
    with pytest.raises(CheckpointError, match=message):
        convert(folder, "speculators", tmp_path / "b", target=target)


def test_a_tensor_under_two_names(tmp_path: Path) -> None:
    tensors = DRAFTER.state_dict() | {"encoder.fc.weight": DRAFTER.fc.weight}
    folder = write_foreign(tmp_path / "a", public_fields(DRAFTER), tensors)
    with pytest.raises(CheckpointError, match=r"under two names(.|\n)*encoder\.fc\.weight, fc\.weight"):
        read_drafter(folder)


def test_a_recipe_reads_no_pickled_mask_embedding(tmp_path: Path) -> None:
    folder, *_ = checkpoint(tmp_path / "a", {})
    (folder / "mask_embedding.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"pickle(.|\n)*torch\.load"):
        DFLASH.read_config(folder)
