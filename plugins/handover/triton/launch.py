"""Launches the kernels of the handover. Nothing here waits for the device: a CUDA graph can capture it."""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.handover.triton.kernel import begin_kernel, end_kernel
from d2sd.plugins.shared.sizes import power

#: 32 requests of 16 tokens are 4 numbers a thread.
END_WARPS = 4

# Shape letters: B requests, R rows of the state, G block size γ, S stop tokens.


def begin_triton(
    anchor: Tensor, context_len: Tensor, active: Tensor, late: Tensor, source: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`begin`: anchors and context lengths [B] int64 and which rows are active [B] bool, of the batch's own,
    `late` [B] bool, `source` [B] int64 and the state [3, R] int64.
    """
    (rows,) = anchor.shape
    new_anchor, new_context_len = torch.empty(2, rows, dtype=torch.long, device=anchor.device).unbind(0)
    new_active = torch.empty(rows, dtype=torch.bool, device=anchor.device)
    given = (x.contiguous() for x in (anchor, context_len, active, late, source))
    with torch.cuda.device_of(anchor):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        begin_kernel[(1,)](
            *given, state, new_anchor, new_context_len, new_active, state.shape[1], rows, BP=power(rows), num_warps=1
        )
    return new_anchor, new_context_len, new_active


def end_triton(
    context_len: Tensor, active: Tensor, tokens: Tensor, count: Tensor, limit: Tensor, stop: Tensor, state: Tensor
) -> None:
    """`end`: writes the state [3, R] int64 of the step's B rows. context_len, count and limit [B] int64,
    active [B] bool, tokens [B, G] int64, stop [B, S] int64.
    """
    rows, size = tokens.shape
    given = context_len.contiguous(), active.contiguous(), tokens.contiguous(), count
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]
        end_kernel[(1,)](
            *given, limit.contiguous(), stop.contiguous(), state, count.stride(0), state.shape[1], rows,
            BP=power(rows), G=size, GP=power(size), STOPS=stop.shape[1], num_warps=END_WARPS,
        )  # fmt: skip
