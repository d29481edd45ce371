"""A draft vocabulary as the tensors of a speculators checkpoint, V target tokens and Vd draft tokens.

    t2d [V] bool      which tokens can be drafted
    d2t [Vd] int64    an *offset*: draft token i is target token i + d2t[i]

Both encode the same ids; a file in which they differ, or whose d2t holds the ids themselves, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from d2sd.errors import CheckpointError


def to_tensors(ids: tuple[int, ...], vocab_size: int) -> dict[str, Tensor]:
    """Ascending ids -> t2d and d2t."""
    tokens = torch.tensor(ids)
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[tokens] = True
    return {"t2d": marked, "d2t": tokens - torch.arange(len(ids))}


def from_tensors(tensors: Mapping[str, Tensor], size: int, vocab_size: int, where: str) -> tuple[int, ...]:
    """t2d and d2t, of checked shapes, -> ascending ids; raises `CheckpointError` naming the tensor of `where`.

    `size` is the config's draft_vocab_size.
    """
    marked, offsets = tensors["t2d"], tensors["d2t"]
    ids = offsets + torch.arange(size)
    expected = marked.nonzero().flatten()
    if len(expected) != size:
        raise CheckpointError(
            "t2d marks a different number of tokens than draft_vocab_size.", where=f"{where}: t2d",
            found=len(expected), expected=size,
        )  # fmt: skip
    if torch.equal(offsets, expected) and not torch.equal(ids, expected):
        raise CheckpointError(
            "d2t holds target tokens, not offsets.", where=f"{where}: d2t", found=offsets[:8].tolist(),
            expected=f"{(offsets - torch.arange(size))[:8].tolist()}: draft token i is target token i + d2t[i]",
        )  # fmt: skip
    if not torch.equal(ids, expected):
        index = int((ids != expected).nonzero()[0])
        raise CheckpointError(
            "t2d and d2t do not name the same tokens.", where=f"{where}: d2t[{index}]",
            found=f"target token {int(ids[index])}", expected=f"{int(expected[index])}, the next that t2d marks",
        )  # fmt: skip
    return tuple(ids.tolist())
