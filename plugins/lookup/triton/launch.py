"""Launches the kernels of lookup. Nothing here waits for the device: a CUDA graph can capture it."""
# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"

from __future__ import annotations

import torch
from triton import next_power_of_2 as power

from d2sd.plugins.lookup.triton.kernel import append_kernel, copy_kernel
from d2sd.plugins.lookup.types import LENGTHS, LONGEST, SUPPORT, Copy
from d2sd.plugins.trees import Draft

#: Places of a text that a program compares at a time.
TILE, WARPS = 1024, 4


def find_copy(text, first, scores, temperature):
    batch, slots, width = first.tokens.shape
    tokens, logprob = first.tokens.new_empty(batch, slots, 1), first.logprob.new_empty(batch, slots, 1)
    copy = Copy(Draft(tokens, logprob), torch.empty_like(text.context_len))
    with torch.cuda.device_of(text.pages):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        copy_kernel[(batch,)](
            text.pages,
            text.page_table.contiguous(),
            text.context_len,
            text.anchor,
            first.tokens.contiguous(),
            first.logprob.contiguous(),
            scores.table,
            temperature,
            tokens,
            copy.length,
            logprob,
            text.page_table.shape[1],
            S=slots,
            SP=power(slots),
            WIDTH=width,
            PAGE=text.pages.shape[1],
            TILE=TILE,
            LONGEST=LONGEST,
            LENGTHS=LENGTHS,
            SUPPORT=SUPPORT,
            num_warps=WARPS,
        )
    return copy


def append(text, tokens, accepted, active):
    batch, size = accepted.path.shape
    with torch.cuda.device_of(text.pages):  # type: ignore[no-untyped-call]
        append_kernel[(batch,)](
            text.pages,
            text.page_table.contiguous(),
            text.context_len,
            tokens.contiguous(),
            accepted.path.contiguous(),
            accepted.count,
            active,
            text.page_table.shape[1],
            tokens.shape[1],
            accepted.count.stride(0),
            G=size,
            GP=power(size),
            PAGE=text.pages.shape[1],
            num_warps=1,
        )
