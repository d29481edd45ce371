"""The gated delta rule over a tree of rows from one committed state, and the short convolution in front of it.

    types.py       `DeltaRows`, what rows write into a state
    reference/     the specification in plain PyTorch: the recurrence, the closed form, the convolution
    cpu.py         the recurrence and the convolution by the compiled library
    triton/        the kernels and their launches

    op                    rows                        states
    tree_delta_rule       of a tree                   unchanged
    commit_delta_rule     the accepted path           advanced in place, in all layers
    chunk_delta_rule      chunks of prompts           advanced in place
    convolution, commit_convolution, chunk_convolution: the same, of the inputs of the convolution

Rounding. Commits of trees are the recurrence everywhere, so a state's bits depend on the committed tokens alone, not on
how many were committed at once. Outputs of a tree are the closed form, which reads the state once for all rows and
differs from plain decoding by rounding; with `exact`, and always by the compiled library, they are the recurrence along
each row's path, bit for bit what plain decoding computes. The same holds of chunks, whose states are committed in the
same form.

Slot 0 of the states takes padding: nothing is written there, and the outputs of its requests are undefined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import ChunkMask
from d2sd.plugins.cascade_attention.mask import AttnMask, allowed_of
from d2sd.plugins.delta_rule.reference.closed_form import chunk_closed_form, tree_closed_form
from d2sd.plugins.delta_rule.reference.convolution import commit_convolution, convolution
from d2sd.plugins.delta_rule.reference.recurrence import (
    chunk_recurrence,
    commit_delta_rule,
    picked_rule,
    tree_recurrence,
)
from d2sd.plugins.delta_rule.types import OP, DeltaRows
from d2sd.plugins.dispatch import op

__all__ = [
    "DeltaRows", "chunk_convolution", "chunk_delta_rule", "commit_chunk_inputs", "commit_convolution",
    "commit_delta_rule", "convolution", "last_rows", "tree_delta_rule",
]  # fmt: skip

# Shape letters: B requests, T rows, N rows of all chunks, P slots in the pool, Hk/Hv heads of keys and of values, Dk/Dv
# their sizes, L layers, G longest path, C channels, W taps of the convolution.


@op(OP, picked=picked_rule)
def tree_delta_rule(
    q: Tensor, rows: DeltaRows, states: Tensor, slots: Tensor, attn_mask: Tensor | AttnMask, *, exact: bool = False
) -> Tensor:
    """Outputs of T new rows, each as if its ancestors alone came between it and its request's committed state.

    Queries and keys are divided by their norm, and queries scaled by Dk^-0.5.

    Args:
        q: [B, T, Hk, Dk].
        rows: of one layer.
        states: [P, Hv, Dk, Dv] fp32, contiguous, of the layer; read at `slots`.
        slots: [B] int64, the slot of each request; 0 for padding.
        attn_mask: [B, T, T] bool, ancestors and self, of a tree whose ancestors come before their descendants. Padding
            rows see themselves alone.
        exact: the outputs are the bits of plain decoding.

    Returns:
        [B, T, Hv, Dv] in v's type.
    """
    return (tree_recurrence if exact else tree_closed_form)(q, rows, states, slots, allowed_of(attn_mask))


@op(OP, picked=picked_rule)
def chunk_delta_rule(
    q: Tensor, rows: DeltaRows, states: Tensor, slots: Tensor, chunks: ChunkMask, *, exact: bool = False
) -> Tensor:
    """Outputs of chunks of B prompts, one behind the other, each causal, and their states advanced in place.

    Args:
        q: [1, N, Hk, Dk].
        rows: of one layer, B = 1 and T = N.
        states, slots: as of `tree_delta_rule`.
        chunks: lengths and starts.
        exact: outputs and states are the bits of plain decoding, wherever prompts are cut into chunks.

    Returns:
        [1, N, Hv, Dv] in v's type.
    """
    return (chunk_recurrence if exact else chunk_closed_form)(q, rows, states, slots, chunks)


def chunk_convolution(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    chunks: ChunkMask,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
) -> Tensor:
    """`convolution` of chunks of B prompts, x [1, N, C], and their last inputs kept in place."""
    out = convolution(x, weight, states, slots, chunks, bias, silu=silu)
    commit_chunk_inputs(x, states, slots, last_rows(chunks, states.shape[-1], x.shape[1]))
    return out


def last_rows(chunks: ChunkMask, kept: int, rows: int) -> tuple[Tensor, Tensor]:
    """Path [B, kept] and count [B] of `commit_convolution`: of each chunk among `rows` of all its last `kept`."""
    count = chunks.starts.diff().clamp(max=kept)
    path = (chunks.starts[1:] - count)[:, None] + torch.arange(kept, device=count.device)
    return path.clamp(max=rows - 1), count


def commit_chunk_inputs(x: Tensor, states: Tensor, slots: Tensor, last: tuple[Tensor, Tensor]) -> None:
    """Keep the `last_rows` of chunks x [1, N, C] in `states` [P, C, W - 1] of one layer, in place."""
    commit_convolution(x.expand(len(slots), -1, -1)[None], states[None], slots, *last)
