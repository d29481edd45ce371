"""Converts a drafter's directory: read it, write a temporary folder next to the output, read that back, rename it.

The canonical drafter is written in the format of z-lab or speculators, with every field, whatever the source's format;
one with a pair head also as DFlash 2, which other engines run: the same scores, multiplied out.

    predecessor_codebook [V, R]    A ē of each token
    successor_codebook [V, R]      B ē / √R
    hidden_projection [R, E]       G
    convolutions                   two taps, of which the first passes its input on and the others add nothing

There the head scores all tokens, and a draft vocabulary has no key.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from d2sd.convert.checkpoint import heads
from d2sd.convert.checkpoint.target import TargetParts, read_target_parts
from d2sd.convert.checkpoint.weights import write_tensors
from d2sd.convert.formats import speculators
from d2sd.convert.formats.read import CanonicalDrafter, Format, read_drafter
from d2sd.convert.kinds import DFLASH
from d2sd.errors import BuildError, CheckpointError
from d2sd.io import claim, disk_space, exclusive, remove, write_json
from d2sd.modeling.config import Role
from d2sd.modeling.drafters.head_configs import PairConfig, SelectorConfig
from d2sd.modeling.drafters.pair import PairHead

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


#: Taps of the convolutions, and channels that share a coefficient: as in the released checkpoints.
_TAPS, _GROUP = 2, 16


def as_dflash2(drafter: CanonicalDrafter, target: TargetParts | None) -> CanonicalDrafter:
    """The same drafter in the layout of DFlash 2; one that has a selector already stays as it is.

    Raises `CheckpointError` for other drafters, and without a target, whose embedding a pair head projects.
    """
    config = drafter.config
    if isinstance(config.head, SelectorConfig):
        return drafter
    if not isinstance(config.head, PairConfig):
        raise CheckpointError(
            "Only a drafter with a pair head can be written as DFlash 2.",
            where=drafter.folder / "config.json",
            found=config.head.name + " head" if config.head else "no head",
        )
    if target is None:
        raise CheckpointError(
            "A pair head projects the target's embedding.",
            where=drafter.folder,
            expected="the target",
            fix="name it: --target DIR",
        )
    hidden = config.body.hidden_size
    selector = SelectorConfig(config.head.rank, config.head.candidates, _TAPS, gcd(_GROUP, hidden))
    new = replace(config, head=selector, draft_vocabulary=None)
    notes = list(drafter.notes)
    if config.draft_vocabulary is not None:
        notes.append(f"all tokens are drafted, not {len(config.draft_vocabulary)}: DFlash 2 has no draft vocabulary")
    tensors = {name: tensor for name, tensor in drafter.tensors.items() if not name.startswith("pair_head.")}
    tensors |= _codebooks(drafter, config.head, target)
    for name, shape in DFLASH.shapes(new).items():
        if name not in tensors:
            tensors[name] = torch.zeros(shape, dtype=drafter.dtype)
            if name.endswith("base_kernel"):
                tensors[name][:, 0] = 1
    return CanonicalDrafter(new, tensors, drafter.format, drafter.folder, tuple(notes))


def _codebooks(drafter: CanonicalDrafter, config: PairConfig, target: TargetParts) -> dict[str, Tensor]:
    prefix = "pair_head."
    head = PairHead(config, drafter.config.body.hidden_size)
    own = {name.removeprefix(prefix): t for name, t in drafter.tensors.items() if name.startswith(prefix)}
    head.load_state_dict(own, assign=True)
    head.join(target.embedding)
    assert head.predecessor_table is not None
    return {
        "candidate_selector.predecessor_codebook": head.predecessor_table,
        "candidate_selector.successor_codebook": head.successors,
        "candidate_selector.hidden_projection.weight": own["hidden_projection.weight"],
    }
