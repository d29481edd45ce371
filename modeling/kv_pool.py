"""The rows of a forward pass, and the paged K/V pool of one model that they read.

Rows have positions, a committed context in pages, and a mask among them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from d2sd.modeling.config import BodyConfig
from d2sd.plugins.cascade_attention import AttnMask, ChunkMask, PagedContext, cascade_attention
from d2sd.plugins.kv_pages import write_pages

# Shape letters: B requests, T rows of each, N rows of all or positions to write, M pages a request, Z tokens a page, P
# pages, L layers, Hkv heads, D head size, E hidden, n auxiliary layers.


@dataclass(frozen=True, slots=True)
class Rows:
    """B requests, each with T new rows over its committed context."""

    positions: Tensor  # [B, T] int64, absolute position of each row: in a tree, context length + depth
    attn_mask: Tensor  # [B, T, T] bool, row t may attend to row u
    page_table: Tensor  # [B, M] int64
    context_len: Tensor  # [B] int64, committed tokens
    needed: tuple[int, ...] | None = None  # rows of each request, its first, whose outputs are read; None: all

    @staticmethod
    def chain(length: int, page_table: Tensor, context_len: Tensor) -> Rows:
        """Consecutive rows after the context under a causal mask."""
        steps = torch.arange(length, device=context_len.device)
        attn_mask = (steps[:, None] >= steps).expand(len(context_len), length, length)
        return Rows(context_len[:, None] + steps, attn_mask, page_table, context_len)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The next rows of B prompts, one prompt behind the other: tensors of a pass over them are [1, N, ...]."""

    attn_mask: ChunkMask
    positions: Tensor  # [1, N] int64
    pages: Tensor  # [N] int64, the page of each row's position
    page_table: Tensor  # [B, M] int64
    context_len: Tensor  # [B] int64, committed tokens

    @staticmethod
    def of(lengths: Sequence[int], page_table: Tensor, context_len: Tensor, page_size: int) -> Chunks:
        """`lengths[b]` rows right after the context of request b. The page table covers their positions."""
        assert min(lengths) > 0
        device = context_len.device
        starts = torch.tensor([0, *accumulate(lengths)], device=device)
        rows = [(request, step) for request, length in enumerate(lengths) for step in range(length)]
        request, step = torch.tensor(rows, device=device).unbind(1)
        positions = context_len[request] + step
        pages = page_table[request, positions // page_size]
        return Chunks(ChunkMask(tuple(lengths), starts), positions[None], pages, page_table, context_len)


def windowed(rows: Rows | Chunks, window: int | None, causal: bool = False) -> AttnMask | ChunkMask:
    """The mask of rows that see `window` tokens at most, each itself included; None: all tokens before them. `causal`:
    no row sees one behind its own position.

    Positions count from that of a request's first row, which is behind its context: a context may be cut in front
    (`d2sd.runtime.drafting.window`).
    """
    if isinstance(rows, Chunks):
        mask = rows.attn_mask
        if window is None:
            return mask
        counts, total = torch.diff(mask.starts), sum(mask.lengths)  # known on the host, which need not wait for it
        ends, starts = (
            part.repeat_interleave(counts, output_size=total) for part in (rows.context_len, mask.starts[:-1])
        )
        steps = torch.arange(total, device=ends.device) - starts
        return replace(mask, first=(ends + steps - (window - 1)).clamp(min=0), window=window)
    allowed = causal_mask(rows) if causal else rows.attn_mask
    if window is None:
        return AttnMask(allowed)
    steps = rows.positions - rows.positions[:, :1]
    near = steps[:, :, None] - steps[:, None] < window
    first = (rows.context_len[:, None] + steps - (window - 1)).clamp(min=0)
    return AttnMask(allowed & near, first, window)


def causal_mask(rows: Rows) -> Tensor:
    """The mask [B, T, T] among rows that see none behind their own position."""
    return rows.attn_mask & (rows.positions[:, :, None] >= rows.positions[:, None])


def first_rows(needed: Sequence[int], count: int) -> Tensor:
    """Numbers of the first `needed[b]` rows of each request b among all rows, `count` of each request."""
    return torch.tensor([b * count + row for b, length in enumerate(needed) for row in range(length)])


class ContextRows(NamedTuple):
    """Committed rows of any requests, as the drafters take them."""

    features: Tensor  # [N, n·E]
    positions: Tensor  # [N]
    pages: Tensor  # [N], 0 for rows that are not kept


@dataclass(frozen=True)
class CommittedRows:
    """Rows that a step commits, where `keep`; the pages of all drafters have one size."""

    features: Tensor  # [B, T, n·E]
    page_table: Tensor  # [B, M]
    positions: Tensor  # [B, T]
    keep: Tensor  # [B, T]
    page_size: int

    @property
    def tensors(self) -> list[Tensor]:
        return [self.features, self.page_table, self.positions, self.keep]

    @cached_property
    def rows(self) -> ContextRows:
        last = self.page_table.shape[1] - 1  # rows not kept may be past it
        places = (self.positions // self.page_size).clamp(max=last)
        pages = torch.where(self.keep, self.page_table.gather(1, places), 0)
        return ContextRows(self.features.flatten(0, 1), self.positions.flatten(), pages.flatten())


class Attend(Protocol):
    """Attends in a layer: q [B, T, Hq, D], k, v [B, T, Hkv, D] -> [B, T, Hq, D]; with `scale`, 0-dim fp32, in FP8.

    `sinks` [Hq] are the layer's, if it has any.
    """

    def __call__(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None = None, *, sinks: Tensor | None = None
    ) -> Tensor: ...


class KVPool:
    """Keys and values of committed tokens, of all layers of a model. Page 0 is the scratch page of padding rows.

    FP8 (E4M3) pools have a scale a layer for keys and one for values. Their rows' K/V must be rounded to what the pages
    hold before they attend (`d2sd.modeling.fp8.Fp8Cache`), so that a row has the same K/V before and after its commit.
    """

    def __init__(
        self,
        body: BodyConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        fp8: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """For a model of this geometry, in `dtype` unless `fp8` has the scales (k_scale, v_scale), [L] fp32 each."""
        shape = (body.num_layers, pages, page_size, body.num_kv_heads, body.head_dim)
        stored = dtype if fp8 is None else torch.float8_e4m3fn
        self.k = torch.zeros(shape, dtype=stored, device=device)  # [L, P, Z, Hkv, D]
        self.v = torch.zeros(shape, dtype=stored, device=device)
        self.scales = fp8  # (k_scale, v_scale) of FP8 pages, [L] fp32 each
        self.page_size = page_size
        self._windows = body.windows or (None,) * body.num_layers
        self._views = body.views

    def from_layer(self, first: int, stop: int | None = None) -> KVPool:
        """The same memory without the layers before `first`, and those from `stop` on."""
        pool, layers = copy.copy(self), slice(first, stop)
        pool.k, pool.v, pool._windows = self.k[layers], self.v[layers], self._windows[layers]
        pool._views = self._views[layers]
        pool.scales = None if self.scales is None else (self.scales[0][layers], self.scales[1][layers])
        return pool

    def write(
        self, k: Tensor, v: Tensor, page_table: Tensor, positions: Tensor, keep: Tensor, path: Tensor | None = None
    ) -> None:
        """Commit rows k, v [L, B, T, Hkv, D]; the other arguments are those of `write_pages`."""
        write_pages(k, v, self.k, self.v, page_table, positions, keep, path, *(self.scales or ()))

    def write_rows(self, k: Tensor, v: Tensor, pages: Tensor, positions: Tensor) -> None:
        """Commit rows k, v [L, N, Hkv, D] of any requests at `positions [N]`, whose pages are `pages [N]`.

        Rows of page 0 are not kept.
        """
        table, slots = pages[:, None], (positions % self.page_size)[:, None]
        self.write(k[:, :, None], v[:, :, None], table, slots, table > 0)

    def attend(self, rows: Rows | Chunks, *, exact: bool = False) -> Attend:
        """The attention of `rows` over this pool, layer by layer; `exact`: batch-invariant on CUDA."""
        masks = {view: windowed(rows, *view) for view in set(self._views)}

        def attend(
            index: int, q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None = None, *, sinks: Tensor | None = None
        ) -> Tensor:
            mask, context = masks[self._views[index]], self.context(index, rows)
            return cascade_attention(q, k, v, context, mask, sinks=sinks, scale=scale, exact=exact)

        return attend

    def context(self, index: int, rows: Rows | Chunks) -> PagedContext:
        """The committed context of `rows` in layer `index`."""
        scales = () if self.scales is None else (self.scales[0][index], self.scales[1][index])
        return PagedContext(self.k[index], self.v[index], rows.page_table, rows.context_len, *scales)
