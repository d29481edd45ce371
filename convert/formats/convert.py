"""Converts a drafter's directory: read it, write a temporary folder next to the output, read that back, rename it.

The canonical drafter is written in the format of z-lab or speculators, with every field. If the source has the same
format and its config.json still describes the drafter, its text and tensors are written unchanged: byte for byte, if
safetensors' own library wrote them into one file with at most one entry of metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor

from d2sd.convert.checkpoint import dflash
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.own_files import write_draft_vocabulary
from d2sd.convert.checkpoint.weights import write_tensors
from d2sd.convert.formats import speculators
from d2sd.convert.formats.read import CanonicalDrafter, Format, read_config, read_drafter
from d2sd.convert.formats.shared_tensors import EMBEDDING, HEAD, TargetParts, read_target_parts
from d2sd.convert.formats.speculators import extra_tensors
from d2sd.errors import BuildError, CheckpointError
from d2sd.io import claim, disk_space, exclusive, remove
from d2sd.modeling.config import Role

Writable = Literal["z-lab", "speculators"]
_PLAIN = {"format": "pt"}


def convert(
    source: Path, to: Writable, output: Path, *, target: Path | None = None, declared: Role | None = None
) -> tuple[Format, list[str]]:
    """Convert the drafter at `source` to a new folder `output`; return its format and notes for the user.

    `target` is a Hugging Face folder or a bundle; `declared` is the role of a drafter whose config has none.
    Raises `D2SDError` and then leaves no output.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise BuildError("Output path already exists.", where=output, fix="choose another folder")
    parts = None if target is None else read_target_parts(target)
    drafter = read_drafter(source, parts, declared)
    output.parent.mkdir(parents=True, exist_ok=True)
    work = output.with_name(f".{output.name}.partial")
    claim(work, "convert")
    with exclusive(work / "lock", wait=False):
        folder = work / "checkpoint"
        remove(folder)  # of a run that was killed
        try:
            with disk_space(work, _size(drafter, parts, to), "the conversion"):
                folder.mkdir()
                notes = write(folder, drafter, to, parts)
            _check(folder, drafter, parts)
            folder.replace(output)
        finally:
            remove(work)
    return drafter.source.format, [*drafter.notes, *notes]


def _check(folder: Path, drafter: CanonicalDrafter, parts: TargetParts | None) -> None:
    """Read the written checkpoint back and assert that it equals `drafter`."""
    again = read_drafter(folder, parts)
    assert again.config == drafter.config, "the written config differs"
    for name, tensor in drafter.tensors.items():
        assert torch.equal(again.tensors[name], tensor), f"the written {name} differs"


def _size(drafter: CanonicalDrafter, parts: TargetParts | None, to: Writable) -> int:
    tensors = [*drafter.tensors.values(), *((parts.embedding, parts.head) if parts and to == "speculators" else ())]
    size: int = sum(tensor.nbytes for tensor in tensors)
    return size + (1 << 20)


def write(folder: Path, drafter: CanonicalDrafter, to: Writable, target: TargetParts | None = None) -> list[str]:
    """Write a checkpoint into an empty `folder`; return notes for the user. Raises `CheckpointError`.

    A speculators checkpoint holds copies of the target's tensors, so it needs the `target`.
    """
    kept = _describes(drafter, to)
    source, config = drafter.source, drafter.config
    tensors, notes = dict(drafter.tensors), []
    if to == "z-lab":
        text = source.text if kept else dflash.config_text(config, drafter.dtype)
        left = dflash.left_to_readers(text, config)
        if left:
            notes.append(f"as in the source, readers use their defaults for {', '.join(left)}; a bundle writes them")
        write_draft_vocabulary(folder, config.draft_vocabulary, config.vocab_size)
    else:
        speculators.check_writable(config, str(source.folder))
        names = source.shared if kept else _shared_names(drafter)
        if target is None and names & {EMBEDDING, HEAD}:
            raise CheckpointError(
                "A speculators checkpoint holds copies of the target's embedding and head.",
                where=source.folder,
                expected="the target",
                fix="name it: --target DIR",
            )
        tensors |= extra_tensors(config, names, target, drafter.dtype)
        text = source.text if kept else _speculators_text(drafter, target)
    (folder / "config.json").write_bytes(text.encode())
    _write_tensors(folder / "model.safetensors", tensors, source.metadata if kept else _PLAIN)
    return notes


def _describes(drafter: CanonicalDrafter, to: Writable) -> bool:
    """Whether the source has this format and its text, read again, gives exactly this drafter's config."""
    source, config = drafter.source, drafter.config
    if source.format != to:
        return False
    raw = HFConfig(json.loads(source.text), str(source.folder / "config.json"))
    again = read_config(raw, to, config.num_target_layers, None)
    return replace(again, draft_vocabulary=config.draft_vocabulary) == config


def _shared_names(drafter: CanonicalDrafter) -> frozenset[str]:
    return frozenset({EMBEDDING, HEAD} | ({"t2d", "d2t"} if drafter.config.draft_vocabulary else set()))


def _speculators_text(drafter: CanonicalDrafter, target: TargetParts | None) -> str:
    assert target is not None, "extra_tensors needed it"
    return speculators.config_text(drafter.config, drafter.dtype, str(target.folder), target.architectures)


def _write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
    if metadata == _PLAIN:
        write_tensors(file, tensors)
    else:  # another writer's metadata: rare, so the file is built in memory
        file.write_bytes(save({name: tensors[name].contiguous() for name in sorted(tensors)}, metadata))
