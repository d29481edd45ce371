"""The gated delta rule over a tree of rows from one committed state, and the short convolution in front of it.

    types.py       `DeltaRows`, what rows write into a state
    reference/     the specification in plain PyTorch: the recurrence, the closed form, the convolution
    cpu.py         the recurrence and the convolution by the compiled library
    triton/        the kernels and their launches

    op                    rows                        states
    tree_delta_rule       of a tree                   unchanged
    commit_delta_rule     the accepted path           advanced in place, in all layers
    chunk_delta_rule      chunks of prompts           advanced in place
    tree_convolution, commit_convolution, chunk_convolution: the same, of the inputs of the convolution

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

from d2sd.plugins import dispatch
from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule.cpu import (
    LANES,
    chunk_delta_rule_cpu,
    commit_delta_rule_cpu,
    convolution_cpu,
    supported,
    tree_delta_rule_cpu,
)
from d2sd.plugins.delta_rule.reference.closed_form import chunk_closed_form, tree_closed_form
from d2sd.plugins.delta_rule.reference.convolution import (
    chunk_convolution_reference,
    commit_convolution_reference,
    tree_convolution_reference,
)
from d2sd.plugins.delta_rule.reference.recurrence import chunk_recurrence, commit_recurrence, tree_recurrence
from d2sd.plugins.delta_rule.types import DeltaRows
from d2sd.plugins.dispatch import Implementation

__all__ = [
    "DeltaRows", "chunk_convolution", "chunk_delta_rule", "commit_chunk_inputs", "commit_convolution",
    "commit_delta_rule", "last_rows", "tree_convolution", "tree_delta_rule",
]  # fmt: skip

# Shape letters: B requests, T rows, N rows of all chunks, P slots in the pool, Hk/Hv heads of keys and of values, Dk/Dv
# their sizes, L layers, G longest path, C channels, W taps of the convolution.

OP = "the gated delta rule"


#: Sizes of heads that the kernels take, as far as they are powers of two.
SIZES = (16, 256)


def _pick(rows: DeltaRows, states: Tensor, *_: object, **__: object) -> Implementation:
    reason, sizes = None, (rows.k.shape[-1], rows.v.shape[-1])
    if any(size & size - 1 or not SIZES[0] <= size <= SIZES[1] for size in sizes):
        reason = f"heads of {sizes[0]} and {sizes[1]} are not powers of two from {SIZES[0]} to {SIZES[1]}"
    elif rows.k.dtype not in dispatch.TYPES:
        reason = f"keys of {rows.k.dtype}"
    return dispatch.pick(OP, rows.v, reason=reason, library=supported(rows, states))


def _pick_convolution(x: Tensor, *_: object, **__: object) -> Implementation:
    return dispatch.pick(OP, x, library=x.shape[-1] % LANES == 0)


_LAUNCH = "d2sd.plugins.delta_rule.triton.launch"
commit_delta_rule = dispatch.op(
    OP, commit_recurrence, f"{_LAUNCH}:commit_delta_rule_triton", library=commit_delta_rule_cpu, picked=_pick
)
commit_convolution = dispatch.op(
    OP, commit_convolution_reference, f"{_LAUNCH}:commit_convolution_triton", picked=_pick_convolution
)


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
    mask = AttnMask(attn_mask) if isinstance(attn_mask, Tensor) else attn_mask
    picked = _pick(rows, states)
    if picked is Implementation.TRITON:
        from d2sd.plugins.delta_rule.triton.launch import exact_delta_rule_triton, tree_delta_rule_triton

        return (exact_delta_rule_triton if exact else tree_delta_rule_triton)(q, rows, states, slots, mask)
    if picked is Implementation.LIBRARY:
        return tree_delta_rule_cpu(q, rows, states, slots, mask.allowed)
    return (tree_recurrence if exact else tree_closed_form)(q, rows, states, slots, mask.allowed)


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
    picked = _pick(rows, states)
    if picked is Implementation.TRITON:
        from d2sd.plugins.delta_rule.triton.launch import chunk_delta_rule_triton, exact_delta_rule_triton

        return (exact_delta_rule_triton if exact else chunk_delta_rule_triton)(q, rows, states, slots, chunks)
    if picked is Implementation.LIBRARY:
        return chunk_delta_rule_cpu(q, rows, states, slots, chunks)
    return (chunk_recurrence if exact else chunk_closed_form)(q, rows, states, slots, chunks)


def tree_convolution(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    attn_mask: Tensor | AttnMask,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
) -> Tensor:
    """The causal convolution of every channel over a row and its nearest W - 1 ancestors, or its silu.

    In place of ancestors before the tree stand the last committed inputs. Bits depend on those inputs alone.

    Args:
        x: [B, T, C].
        weight: [C, W], the row's own tap last.
        states: [P, C, W - 1], contiguous, of the layer, the last committed input last.
        slots, attn_mask: as of `tree_delta_rule`.
        bias: [C].

    Returns:
        [B, T, C] in x's type; sums are fp32.
    """
    mask = AttnMask(attn_mask) if isinstance(attn_mask, Tensor) else attn_mask
    picked = _pick_convolution(x)
    if picked is Implementation.TRITON:
        from d2sd.plugins.delta_rule.triton.launch import convolution_triton

        return convolution_triton(x, weight, states, slots, mask, bias, silu=silu)
    convolve = convolution_cpu if picked is Implementation.LIBRARY else tree_convolution_reference
    return convolve(x, weight, states, slots, mask.allowed, bias, silu=silu)


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
    """`tree_convolution` of chunks of B prompts, x [1, N, C], and their last inputs kept in place."""
    picked = _pick_convolution(x)
    if picked is Implementation.TRITON:
        from d2sd.plugins.delta_rule.triton.launch import convolution_triton

        out = convolution_triton(x, weight, states, slots, chunks, bias, silu=silu)
    else:
        convolve = convolution_cpu if picked is Implementation.LIBRARY else chunk_convolution_reference
        out = convolve(x, weight, states, slots, chunks, bias, silu=silu)
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
