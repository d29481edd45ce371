"""The state that a step leaves on the device to the next: read before a step, and written after it.

    reference.py   the specification in plain PyTorch
    triton/        one program before a step and one after it, and their launchers

The state is [3, R] int64: of each row the anchor, the context length, and whether it is active.
"""

from __future__ import annotations

from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.dispatch import Implementation
from d2sd.plugins.handover.reference import begin_reference, end_reference

__all__ = ["begin", "end"]

# Shape letters: B requests, R rows of the state, G block size γ, S stop tokens.

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
