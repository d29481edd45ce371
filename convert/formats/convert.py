"""Converts a drafter's directory: read it, write a temporary folder next to the output, read that back, rename it."""

from __future__ import annotations

from pathlib import Path

import torch

from d2sd.convert.formats.canonical import CanonicalDrafter, Format
from d2sd.convert.formats.read import read_drafter
from d2sd.convert.formats.shared_tensors import TargetParts, read_target_parts
from d2sd.convert.formats.write import Writable, write
from d2sd.errors import BuildError
from d2sd.io import claim, disk_space, exclusive, remove
from d2sd.modeling.config import Role


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
