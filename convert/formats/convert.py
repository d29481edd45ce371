"""Converts a drafter's directory: read it, write a temporary folder next to the output, read that back, rename it.

The canonical drafter is written in the format of z-lab or speculators, with every field, whatever the source's format;
one with a pair head also as DFlash 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from d2sd.convert.checkpoint import heads
from d2sd.convert.checkpoint.weights import write_tensors
from d2sd.convert.formats import speculators
from d2sd.convert.formats.dflash2 import as_dflash2
from d2sd.convert.formats.read import CanonicalDrafter, Format, read_drafter
from d2sd.convert.formats.shared_tensors import TargetParts, read_target_parts
from d2sd.convert.kinds import DFLASH
from d2sd.errors import BuildError, CheckpointError
from d2sd.io import claim, disk_space, exclusive, remove, write_json
from d2sd.modeling.config import Role

Writable = Literal["z-lab", "speculators", "dflash2"]


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
    if to == "dflash2":
        drafter = as_dflash2(drafter, parts)
    output.parent.mkdir(parents=True, exist_ok=True)
    work = output.with_name(f".{output.name}.partial")
    claim(work, "convert")
    with exclusive(work / "lock", wait=False):
        folder = work / "checkpoint"
        remove(folder)  # of a run that was killed
        try:
            with disk_space(work, _size(drafter, parts, to), "the conversion"):
                folder.mkdir()
                write(folder, drafter, to, parts)
            _check(folder, drafter, parts, to)
            folder.replace(output)
        finally:
            remove(work)
    return drafter.format, list(drafter.notes)


def _check(folder: Path, drafter: CanonicalDrafter, parts: TargetParts | None, to: Writable) -> None:
    """Read the written checkpoint back and assert that it equals `drafter`, of tokens outside its vocabulary only where
    the format has them.
    """
    again, config = read_drafter(folder, parts), drafter.config
    assert again.config == config, "the written config differs"
    kept = heads.all_rows(config, heads.drafted_rows(config, drafter.tensors)) if to == "speculators" else {}
    for name, tensor in {**drafter.tensors, **kept}.items():
        assert torch.equal(again.tensors[name], tensor), f"the written {name} differs"


def _size(drafter: CanonicalDrafter, parts: TargetParts | None, to: Writable) -> int:
    tensors = [*drafter.tensors.values(), *((parts.embedding, parts.head) if parts and to == "speculators" else ())]
    size: int = sum(tensor.nbytes for tensor in tensors)
    return size + (1 << 20)


def write(folder: Path, drafter: CanonicalDrafter, to: Writable, target: TargetParts | None = None) -> None:
    """Write a checkpoint, with every field, into an empty `folder`. Raises `CheckpointError`.

    A speculators checkpoint holds copies of the target's tensors, so it needs the `target`.
    """
    config = drafter.config
    if to != "speculators":
        DFLASH.write(folder, config, drafter.tensors)
        return
    speculators.check_writable(config, str(drafter.folder))
    if target is None:
        raise CheckpointError(
            "A speculators checkpoint holds copies of the target's embedding and head.",
            where=drafter.folder,
            expected="the target",
            fix="name it: --target DIR",
        )
    extra = speculators.extra_tensors(config, target, drafter.dtype)
    fields = speculators.config_fields(config, drafter.dtype, str(target.folder), target.architectures)
    write_json(folder / "config.json", fields)
    tensors = {**drafter.tensors, **heads.drafted_rows(config, drafter.tensors), **extra}
    write_tensors(folder / "model.safetensors", tensors)
