"""The state that a step leaves on the device to the next: read before a step, and written after it.

    reference.py   the specification in plain PyTorch
    triton/        one program before a step and one after it, and their launchers

The state is [3, R] int64: of each row the anchor, the context length, and whether it is active. Besides it a step
leaves the features of the tokens that it commits, which drafters take.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.dispatch import Implementation
from d2sd.plugins.handover.reference import begin_reference, commit_reference, end_reference

__all__ = ["begin", "commit", "end"]

# Shape letters: B requests, R rows of the state, G block size γ, S stop tokens, N nodes, F features of a node, M pages
# a request.

OP = "the handover of steps"


def begin(
    anchor: Tensor, context_len: Tensor, active: Tensor, late: Tensor, source: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors, context lengths [B] int64 and which rows are active [B] bool: of the batch's own, or of the state's rows
    `source` [B] int64 where `late` [B] bool.
    """
    if dispatch.pick(OP, anchor) is Implementation.TRITON:
        from d2sd.plugins.handover.triton.kernel import begin_triton

        return begin_triton(anchor, context_len, active, late, source, state)
    return begin_reference(anchor, context_len, active, late, source, state)


def commit(
    path: Tensor,
    count: Tensor,
    active: Tensor,
    context_len: Tensor,
    features: Tensor,
    tables: Sequence[Tensor] = (),
    into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that a step commits: features [B, G, F], positions [B, G] int64, and whether each is kept [B, G] bool.

    They are those of the nodes `path` [B, G] among `features` [B, N, F], the first `count` [B] of each `active` [B]
    request, behind its `context_len` [B]. Rows that are not kept have features and positions as if they were.

    Args:
        tables: [B, M] int64, page tables to copy; only with `into`.
        into: features [B, G', F], positions and `keep` [B, G'], G' ≥ G, and copies of the tables. Their first G rows
            receive the result and are returned, and in the others `keep` becomes false. None: new tensors.
    """
    if dispatch.pick(OP, path) is Implementation.TRITON:
        from d2sd.plugins.handover.triton.rows import commit_triton

        return commit_triton(path, count, active, context_len, features, tables, into)
    return commit_reference(path, count, active, context_len, features, tables, into)


def end(
    context_len: Tensor, active: Tensor, tokens: Tensor, count: Tensor, limit: Tensor, stop: Tensor, state: Tensor
) -> None:
    """Write the state of the step's rows: its tokens [B, G], of which `count` [B] are new. A row ends at the context
    length `limit` [B] or at a token of `stop` [B, S], among which is every one below 0.
    """
    if dispatch.pick(OP, tokens) is Implementation.TRITON:
        from d2sd.plugins.handover.triton.kernel import end_triton

        end_triton(context_len, active, tokens, count, limit, stop, state)
        return
    end_reference(context_len, active, tokens, count, limit, stop, state)
