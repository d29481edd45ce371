"""A drafter with a pair head as a DFlash 2 drafter, which other engines run: the same scores, multiplied out.

    predecessor_codebook [V, R]    A ē of each token
    successor_codebook [V, R]      B ē / √R
    hidden_projection [R, E]       G
    convolutions                   two taps, of which the first passes its input on and the others add nothing

There the head scores all tokens, and a draft vocabulary has no key.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from d2sd.convert.formats.read import CanonicalDrafter
from d2sd.convert.formats.shared_tensors import TargetParts
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError
from d2sd.modeling.drafters.head_configs import PairConfig, SelectorConfig
from d2sd.modeling.drafters.pair import PairHead

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
