"""Reads any format into the canonical drafter: unknown and missing keys and tensors are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from d2sd.convert.checkpoint.dflash import check_target, read_layout
from d2sd.convert.checkpoint.draft_vocab import read_draft_vocabulary
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.layer_ids import sort_columns
from d2sd.convert.checkpoint.weights import TensorInfo, open_tensors, read_headers, read_tensors
from d2sd.convert.formats import speculators
from d2sd.convert.formats.canonical import CanonicalDrafter, Format, Source
from d2sd.convert.formats.detect import PICKLES, QUANTIZED, detect
from d2sd.convert.formats.shared_tensors import EMBEDDING, HEAD, TargetParts
from d2sd.convert.formats.speculators_tensors import EXTRA, read_extra
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DrafterConfig, Role

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_drafter(folder: Path, target: TargetParts | None = None, declared: Role | None = None) -> CanonicalDrafter:
    """Read a checkpoint of any format; raises `CheckpointError` naming file and key or tensor.

    With a `target` the drafter is checked against it. `declared` is the role of a drafter whose config has none.
    """
    raw = HFConfig.read(folder)
    form = detect(raw)
    _check_files(folder)
    config = read_config(raw, form, target.config.body.num_layers if target else None, declared)
    found = read_headers(folder)
    extra = {name: found[name] for name in EXTRA if form == "speculators" and name in found}
    tensors = _body_tensors(folder, config, found, extra)
    notes = _declaration(raw, form, config, declared)
    if form == "speculators":
        size, dtype = speculators.draft_vocab_size(raw), tensors["fc.weight"].dtype
        ids, more = read_extra(config, size, extra, target, dtype, raw.where)
        config = replace(config, draft_vocabulary=ids)
        notes += more
    else:
        config = replace(
            config, draft_vocabulary=read_draft_vocabulary(folder, config.vocab_size, config.mask_token_id)
        )
    ids = config.target_layer_ids
    if list(ids) != sorted(ids):
        config = replace(config, target_layer_ids=tuple(sorted(ids)))
        tensors["fc.weight"] = sort_columns(tensors["fc.weight"], ids)
        notes.append(f"layer ids {list(ids)} and the columns of fc.weight with them are put in ascending order")
    if target is not None:
        check_target(config, target.config, folder)
    source = Source(form, folder, _text(folder), _metadata(found["fc.weight"].file), frozenset(extra))
    return CanonicalDrafter(config, tensors, source, (*notes, *_unread_files(folder, found)))


def read_config(raw: HFConfig, form: Format, num_target_layers: int | None, declared: Role | None) -> DrafterConfig:
    """Read a config of `form`, layer ids in the file's order, without the draft vocabulary."""
    if form == "speculators":
        return speculators.read_speculators(raw, num_target_layers, declared)
    return read_layout(raw, declared)


def _check_files(folder: Path) -> None:
    """Refuse files next to the config that change what the weights mean."""
    for name in (*QUANTIZED, "mask_embedding.pt"):
        if (folder / name).exists():
            is_mask = name.endswith(".pt")
            what = "The drafter has a mask embedding of its own" if is_mask else "This is a quantized checkpoint"
            fix = None if is_mask else "convert the checkpoint from before it was quantized"
            raise CheckpointError(f"{what}, which d2sd does not run.", where=folder / name, fix=fix)


def _body_tensors(
    folder: Path, config: DrafterConfig, found: Mapping[str, TensorInfo], extra: Mapping[str, TensorInfo]
) -> dict[str, Tensor]:
    dtypes = {info.dtype for name, info in found.items() if name not in extra or name in (EMBEDDING, HEAD)}
    dtype = _DTYPES.get(min(dtypes, default="F32"), torch.float32)  # other types are refused by name below
    tensors: dict[str, Tensor] = {}
    for _, part in read_tensors(folder, DFLASH.shapes(config), dtype, lambda name: None if name in extra else name):
        tensors |= part
    if len(dtypes) > 1:
        raise CheckpointError(
            "The tensors have different types.", where=folder, found=", ".join(sorted(dtypes)), expected="one type",
        )  # fmt: skip
    return tensors


def _declaration(raw: HFConfig, form: Format, config: DrafterConfig, declared: Role | None) -> list[str]:
    own = raw.values.get("d2sd" if form == "speculators" else "dflash_config") or {}
    silent = not any(own.get(key) for key in ("training_mode", "loss_type"))
    return [f"the role {config.role} is declared, not read: the config has no role"] if declared and silent else []


def _unread_files(folder: Path, found: Mapping[str, TensorInfo]) -> list[str]:
    """Name the files that are not read: code is never run or copied, pickles are never opened."""
    read = {info.file.name for info in found.values()} | {
        "config.json", "draft_vocab.json", "model.safetensors.index.json",
    }  # fmt: skip
    others = sorted(p.name for p in folder.iterdir() if p.name not in read and not p.name.startswith("."))
    pickles = [name for name in others if name in PICKLES]
    notes = [f"not converted: {', '.join(others)}"] if others else []
    return notes + [f"{name} is a pickle and was not opened: its training settings are unknown" for name in pickles]


def _text(folder: Path) -> str:
    return (folder / "config.json").read_bytes().decode("utf-8")


def _metadata(file: Path) -> dict[str, str] | None:
    with open_tensors(file) as handle:
        metadata: dict[str, str] | None = handle.metadata()
    return metadata
