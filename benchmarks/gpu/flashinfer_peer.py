"""FlashInfer's paged prefill with a custom mask, if installed: the same pages, with the new rows appended."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.call import Call
from benchmarks.gpu.cases import Skip
from benchmarks.gpu.peers import Run
from benchmarks.gpu.shapes import PAGE_SIZE

NAME = "flashinfer"


def flashinfer(call: Call) -> Run:
    """A planned run; the result [B·T, Hq, D] is to be viewed. Raises `Skip` where FlashInfer is missing or the call is
    none for it: lengths must fill their pages, since new rows are in pages of their own here.
    """
    if find_spec("flashinfer") is None:
        raise Skip("flashinfer is not installed")
    slots = call.context.page_table.shape[1] * PAGE_SIZE
    if call.context.fp8 or int(call.context.context_len.min()) != slots:
        raise Skip("FP8 pages, or contexts that do not fill theirs")
    wrapper_class: Any = __import__("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    batch, rows, heads, size = call.q.shape
    pages, ends, indices = longer_pages(call)
    wrapper = wrapper_class(torch.empty(128 << 20, dtype=torch.uint8, device=call.q.device), "NHD")
    context = call.attn_mask.new_ones(batch, rows, slots)
    wrapper.plan(
        torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=call.q.device),
        ends,
        indices,
        torch.full((batch,), (rows - 1) % PAGE_SIZE + 1, dtype=torch.int32, device=call.q.device),
        heads,
        call.k.shape[2],
        size,
        PAGE_SIZE,
        custom_mask=torch.cat([context, call.attn_mask], dim=2).flatten(),
        q_data_type=call.q.dtype,
        kv_data_type=call.q.dtype,
    )
    queries = call.q.flatten(0, 1)

    def run() -> Tensor:
        out: Tensor = wrapper.run(queries, pages)
        return out

    return run


def longer_pages(call: Call) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Pools with the new rows in pages at their end; where each request's page ids end, int32 [B + 1]; the ids."""
    batch, rows, kv_heads, size = call.k.shape
    more = -(-rows // PAGE_SIZE)

    def longer(pool: Tensor, new: Tensor) -> Tensor:
        padded = new.new_zeros(batch, more * PAGE_SIZE, kv_heads, size)
        padded[:, :rows] = new
        return torch.cat([pool, padded.view(batch * more, PAGE_SIZE, kv_heads, size)])

    first = len(call.context.k_pages)
    behind = torch.arange(first, first + batch * more, device=call.q.device).view(batch, more)
    table = torch.cat([call.context.page_table, behind], dim=1).int()
    ends = torch.arange(batch + 1, dtype=torch.int32, device=call.q.device) * table.shape[1]
    return (longer(call.context.k_pages, call.k), longer(call.context.v_pages, call.v)), ends, table.flatten()
