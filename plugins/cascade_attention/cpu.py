"""The attention of the compiled library by itself, for layers on a CPU that are PyTorch's.

A row's keys are read in the order of their positions, so its bits do not depend on what is computed with it.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import ctypes
from itertools import accumulate

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import ChunkMask, PagedContext
from d2sd.plugins.cascade_attention.mask import AttnMask
from d2sd.plugins.cpu import library
from d2sd.plugins.shared.fp8 import stored

# Shape letters: B requests, T rows, N rows of chunks, M rows of all, Hq/Hkv query and K/V heads, D head size.


def takes(q: Tensor, context: PagedContext) -> bool:
    """Whether the library attends with these heads over these pages."""
    size, pages = q.shape[-1], context.k_pages
    fits = size % library.HEAD_STEP == 0 and size <= library.LARGEST_HEAD
    return fits and pages.dtype == q.dtype and q.dtype in library.TYPES and library.available()


def cascade_attention(q, k, v, context, attn_mask, *, sinks=None, scale=None, exact=False, out=None):
    """Where the library `takes` it."""
    batch, count, heads, size = q.shape
    strides: tuple[int | None, int, int] = None, 0, 0
    mask = AttnMask(attn_mask) if isinstance(attn_mask, Tensor) else attn_mask
    if isinstance(mask, ChunkMask):
        starts, longest = mask.starts, max(mask.lengths)
    else:
        starts, longest = torch.tensor([0, *accumulate([count] * batch)]), count
        allowed = mask.allowed if mask.allowed.stride(2) == 1 else mask.allowed.contiguous()
        strides = allowed.data_ptr(), allowed.stride(0), allowed.stride(1)
    rows, kind = batch * count, library.TYPES[q.dtype]
    kept = [part.contiguous() for part in (k, v, context.page_table.long(), context.context_len.long(), starts.long())]
    keys, values, table, length, starts = kept
    first = None if mask.first is None else mask.first.long().contiguous()
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    queries = q.float().contiguous().view(rows, -1)
    heads_out = torch.empty_like(queries, dtype=torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32)
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
        ctypes.byref(body), ctypes.byref(arguments), library.address(queries), library.address(heads_out),
        ctypes.byref(memory), torch.get_num_threads(),
    )  # fmt: skip
    library.functions().d2sd_free(ctypes.byref(memory))
    return stored(heads_out.view(q.shape).to(q.dtype), scale, out)
