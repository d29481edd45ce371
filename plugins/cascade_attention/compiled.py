"""The attention of the compiled library by itself, for layers on a CPU that are PyTorch's.

A row's keys are read in the order of their positions, so its bits do not depend on what is computed with it.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import ChunkMask, PagedContext
from d2sd.plugins.cpu import library

# Shape letters: B requests, T rows, N rows of chunks, M rows of all, Hq/Hkv query and K/V heads, D head size.


def takes(q: Tensor, context: PagedContext) -> bool:
    """Whether the library attends with these heads over these pages."""
    size, pages = q.shape[-1], context.k_pages
    fits = size % library.HEAD_STEP == 0 and size <= library.LARGEST_HEAD
    return fits and pages.dtype == q.dtype and q.dtype in library.TYPES and library.available()


def attention_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PagedContext,
    mask: Tensor | ChunkMask,
    first: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`cascade_attention` where the library `takes` it; `mask` is that of chunks, or [B, T, T] bool."""
    batch, count, heads, size = q.shape
    strides: tuple[int | None, int, int] = None, 0, 0
    if isinstance(mask, ChunkMask):
        starts, longest = mask.starts, max(mask.lengths)
    else:
        starts, longest = torch.tensor([0, *accumulate([count] * batch)]), count
        mask = mask if mask.stride(2) == 1 else mask.contiguous()
        strides = mask.data_ptr(), mask.stride(0), mask.stride(1)
    rows, kind = batch * count, library.TYPES[q.dtype]
    kept = [part.contiguous() for part in (k, v, context.page_table.long(), context.context_len.long(), starts.long())]
    keys, values, table, length, starts = kept
    first = None if first is None else first.long().contiguous()
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    queries = q.float().contiguous().view(rows, -1)
    out = torch.empty_like(queries, dtype=torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32)
    assert int(length.max()) <= table.shape[1] * context.k_pages.shape[1], "the context is longer than its pages"
    layer = (library.Layer * 1)(library.Layer(sinks=library.address(sinks)))
    body = library.Body(1, heads * size, 0, heads, k.shape[-2], size, kind, None, layer, 0.0)
    view = library.View(*strides, library.address(first), library.address(table), table.shape[1], None, None)
    pages = [library.addresses([library.address(part) or 0]) for part in (context.k_pages, context.v_pages)]
    arguments = library.Pass(
        len(length), longest, library.address(starts), None, (library.View * 1)(view), 1,
        *pages, context.k_pages.shape[1], library.address(length), library.address(keys), library.address(values),
        None, 0, None, None, 0, 1,
    )  # fmt: skip
    memory = library.Memory()
    library.functions().d2sd_attend(
        ctypes.byref(body), ctypes.byref(arguments), library.address(queries), library.address(out),
        ctypes.byref(memory), torch.get_num_threads(),
    )  # fmt: skip
    library.functions().d2sd_free(ctypes.byref(memory))
    return out.view(q.shape).to(q.dtype)
