"""The gated delta rule over a tree of rows from one committed state, and the short convolution in front of it.

    types.py       `DeltaRows`, what rows write into a state
    reference/     the specification in plain PyTorch: the recurrence, the closed form, the convolution
    cpu.py         the recurrence and the convolution by the compiled library

    op                    rows                        states
    tree_delta_rule       of a tree                   unchanged
    commit_delta_rule     the accepted path           advanced in place, in all layers
    chunk_delta_rule      chunks of prompts           advanced in place
    tree_convolution, commit_convolution, chunk_convolution: the same, of the inputs of the convolution

Rounding. Commits are the recurrence everywhere, so a state's bits depend on the committed tokens alone, not on how many
were committed at once. Outputs of a tree are the closed form, which reads the state once for all rows and differs from
plain decoding by rounding; with `exact`, and always by the compiled library, they are the recurrence along each row's
path, bit for bit what plain decoding computes. The same holds of chunks, whose states are committed in the same form.

Slot 0 of the states takes padding: nothing is written there, and rows of a request of slot 0 start from what it holds.
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
    "DeltaRows", "chunk_convolution", "chunk_delta_rule", "commit_convolution", "commit_delta_rule", "tree_convolution",
    "tree_delta_rule",
]  # fmt: skip

# Shape letters: B requests, T rows, N rows of all chunks, P slots in the pool, Hk/Hv heads of keys and of values, Dk/Dv
# their sizes, L layers, G longest path, C channels, W taps of the convolution.

OP = "the gated delta rule"


def _compiled(rows: DeltaRows, states: Tensor) -> bool:
    return dispatch.pick(OP, rows.v, library=supported(rows, states)) is Implementation.LIBRARY


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
    allowed = attn_mask if isinstance(attn_mask, Tensor) else attn_mask.allowed
    if _compiled(rows, states):
        return tree_delta_rule_cpu(q, rows, states, slots, allowed)
    return (tree_recurrence if exact else tree_closed_form)(q, rows, states, slots, allowed)


def commit_delta_rule(rows: DeltaRows, states: Tensor, slots: Tensor, path: Tensor, count: Tensor) -> None:
    """Advance the states of all layers along each request's accepted path, in place, row by row.

    Args:
        rows: stacked by layer, [L, B, T, ...] each.
        states: [L, P, Hv, Dk, Dv] fp32, contiguous.
        slots: [B] int64. No two requests have the same slot but 0.
        path, count: [B, G] and [B] int64, as of `d2sd.plugins.trees.Accepted`: the first `count` rows are committed.
    """
    commit = commit_delta_rule_cpu if _compiled(rows, states) else commit_recurrence
    commit(rows, states, slots, path, count)


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
    if _compiled(rows, states):
        return chunk_delta_rule_cpu(q, rows, states, slots, chunks)
    return (chunk_recurrence if exact else chunk_closed_form)(q, rows, states, slots, chunks)


def tree_convolution(
    x: Tensor, weight: Tensor, states: Tensor, slots: Tensor, attn_mask: Tensor | AttnMask, bias: Tensor | None = None
) -> Tensor:
    """silu of the causal convolution of every channel over a row and its nearest W - 1 ancestors.

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
    allowed = attn_mask if isinstance(attn_mask, Tensor) else attn_mask.allowed
    compiled = dispatch.pick(OP, x, library=x.shape[-1] % LANES == 0) is Implementation.LIBRARY
    return (convolution_cpu if compiled else tree_convolution_reference)(x, weight, states, slots, allowed, bias)


def commit_convolution(x: Tensor, states: Tensor, slots: Tensor, path: Tensor, count: Tensor) -> None:
    """Keep the last W - 1 inputs of each request, in all layers, in place.

    Args:
        x: [L, B, T, C], inputs of the tree's rows.
        states: [L, P, C, W - 1], contiguous.
        slots, path, count: as of `commit_delta_rule`.
    """
    commit_convolution_reference(x, states, slots, path, count)


def chunk_convolution(
    x: Tensor, weight: Tensor, states: Tensor, slots: Tensor, chunks: ChunkMask, bias: Tensor | None = None
) -> Tensor:
    """`tree_convolution` of chunks of B prompts, x [1, N, C], and their last inputs kept in place."""
    compiled = dispatch.pick(OP, x, library=x.shape[-1] % LANES == 0) is Implementation.LIBRARY
    out = (convolution_cpu if compiled else chunk_convolution_reference)(x, weight, states, slots, chunks, bias)
    lengths = chunks.starts.diff()
    count = lengths.clamp(max=weight.shape[1] - 1)
    path = (chunks.starts[1:] - count)[:, None] + torch.arange(weight.shape[1] - 1, device=x.device)
    inputs = x.expand(len(slots), -1, -1)[None]
    commit_convolution(inputs, states[None], slots, path.clamp(max=x.shape[1] - 1), count)
    return out
