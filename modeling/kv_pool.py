"""The rows of a forward pass, and the paged K/V pool of one model that they read.

Rows have positions, a committed context in pages (`Where`), and a mask among them.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.state_pool import StatePool
from d2sd.modeling.where import Where
from d2sd.plugins.cascade_attention import AttnMask, ChunkMask, PagedContext, cascade_attention, counters
from d2sd.plugins.kv_pages import write_pages
from d2sd.plugins.layer_ops import Behind, PagedRows

if TYPE_CHECKING:
    from d2sd.modeling.joining import Joining

# Shape letters: B requests, T rows of each, N rows of all or positions to write, M pages a request, Z tokens a page, P
# pages, L layers, Hkv heads, D head size, E hidden, n auxiliary layers.

#: Scales of FP8 pages, (k, v), [L] fp32 each; (): the pages are not FP8.
Scales = tuple[Tensor, Tensor] | tuple[()]


class PagePart(NamedTuple):
    """Pages of the layers of a pool that have one page table, and heads of one size."""

    layers: tuple[int, ...]  # of the model, ascending
    table: int  # the place of their page table in `Where.tables`
    k: Tensor  # [L', P, Z, Hkv, D]
    v: Tensor
    scales: Scales

    def of(self, x: Tensor) -> Tensor:
        """x [L, B, T, Hkv, D] of all layers, or [L, B, T, W] as `KeysValues.stack` makes it -> [L', B, T, Hkv, D] of
        these; a view where the layers are evenly spaced.
        """
        if x.dim() == 4:
            heads = self.k.shape[-2:]
            x = x[..., : heads.numel()].view(*x.shape[:3], *heads)
        if len(x) == len(self.layers):
            return x
        steps = {after - before for before, after in zip(self.layers, self.layers[1:], strict=False)}
        if len(steps) > 1:
            return torch.stack([x[layer] for layer in self.layers])
        return x[self.layers[0] : self.layers[-1] + 1 : min(steps, default=1)]

    def write(
        self, k: Tensor, v: Tensor, table: Tensor, positions: Tensor, keep: Tensor, path: Tensor | None = None
    ) -> None:
        """Commit these layers' rows of k, v [L, B, T, Hkv, D]; the other arguments are those of `write_pages`."""
        scales = self.scales or (None, None)
        write_pages(self.of(k), self.of(v), self.k, self.v, table, positions, keep, path, *scales)

    def between(self, first: int, stop: int) -> PagePart:
        """The same memory of the layers first .. stop - 1, counted from `first`."""
        some = slice(bisect_left(self.layers, first), bisect_left(self.layers, stop))
        scales: Scales = () if not self.scales else (self.scales[0][some], self.scales[1][some])
        layers = tuple(layer - first for layer in self.layers[some])
        return PagePart(layers, self.table, self.k[some], self.v[some], scales)


@dataclass(frozen=True)
class Rows:
    """B requests, each with T new rows over its committed context."""

    placed: Tensor | Behind  # [B, T] int64, absolute position of each row: in a tree, context length + depth
    attn_mask: Tensor  # [B, T, T] bool, row t may attend to row u
    where: Where
    needed: tuple[int, ...] | None = None  # rows of each request, its first, whose outputs are read; None: all
    packed: Tensor | None = None  # [B, T, ceil(T/32)] int32, `attn_mask` in bits, where they are known
    cut: int = 0  # where a context goes on that was cut behind its first tokens; 0: none is
    joining: Joining | None = None  # what joins behind them in a target's last layers

    @cached_property
    def positions(self) -> Tensor:
        """[B, T] int64, absolute position of each row."""
        return self.placed.absolute if isinstance(self.placed, Behind) else self.placed

    @staticmethod
    def chain(length: int, where: Where) -> Rows:
        """Consecutive rows after the context under a causal mask."""
        steps = torch.arange(length, device=where.context_len.device)
        attn_mask = (steps[:, None] >= steps).expand(len(where.context_len), length, length)
        return Rows(where.context_len[:, None] + steps, attn_mask, where)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The next rows of B prompts, one prompt behind the other: tensors of a pass over them are [1, N, ...]."""

    joining: ClassVar[None] = None

    attn_mask: ChunkMask
    positions: Tensor  # [1, N] int64
    where: Where  # the pass advances its states
    #: [N] int64, the page of each row's position, by page table; and, last, that of the position before in the first.
    pages: tuple[Tensor, ...]

    @staticmethod
    def of(lengths: Sequence[int], where: Where, page_size: int) -> Chunks:
        """`lengths[b]` rows, 0 or more, right after the context of request b. The page tables cover their positions."""
        device, total = where.context_len.device, sum(lengths)
        starts = torch.tensor([0, *accumulate(lengths)], device=device)
        request = torch.arange(len(lengths), device=device).repeat_interleave(starts.diff(), output_size=total)
        positions = torch.arange(total, device=device) + (where.context_len - starts[:-1])[request]
        column = positions // page_size
        before = where.pages[request, (positions - 1).clamp(min=0) // page_size]
        pages = *(table[request, column] for table in where.tables), before
        return Chunks(ChunkMask(tuple(lengths), starts), positions[None], where, pages)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.attn_mask.starts, self.positions, *self.pages, *self.where.tensors]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Chunks:
        """The same rows in other `tensors`, as on another device."""
        starts, positions, *found = tensors
        count, mask = len(self.pages), ChunkMask(self.attn_mask.lengths, starts)
        return Chunks(mask, positions, self.where.with_tensors(found[count:]), tuple(found[:count]))


def windowed(
    rows: Rows | Chunks, window: int | None, causal: bool = False, counters: Tensor | None = None
) -> AttnMask | ChunkMask:
    """The mask of rows that see `window` tokens at most, each itself included; None: all tokens before them. `causal`:
    no row sees one behind its own position. `counters`: of `AttnMask`.

    Positions count from that of a request's first row, which is behind its context: a context may be cut in front
    (`d2sd.runtime.drafting.window`).
    """
    if isinstance(rows, Chunks):
        mask = rows.attn_mask
        if window is None:
            return mask
        counts, total = torch.diff(mask.starts), sum(mask.lengths)  # known on the host, which need not wait for it
        ends, starts = (
            part.repeat_interleave(counts, output_size=total) for part in (rows.where.context_len, mask.starts[:-1])
        )
        steps = torch.arange(total, device=ends.device) - starts
        return replace(mask, first=(ends + steps - (window - 1)).clamp(min=0), window=window)
    allowed = causal_mask(rows) if causal else rows.attn_mask
    if window is None:
        return AttnMask(allowed, counters=counters, packed=None if causal else rows.packed)
    steps = rows.positions - rows.positions[:, :1]
    near = steps[:, :, None] - steps[:, None] < window
    first = (rows.where.context_len[:, None] + steps - (window - 1)).clamp(min=0)
    if rows.cut:  # what is in front of the cut is further away than it seems
        is_cut = rows.positions[:, :1] > rows.where.context_len[:, None]
        first = torch.where(is_cut, first.clamp(min=rows.cut), first)
    return AttnMask(allowed & near, first, window, counters=counters)


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
    pages: tuple[Tensor, ...]  # [N] by page table, 0 for rows that are not kept


@dataclass(frozen=True)
class CommittedRows:
    """Rows that a step commits, where `keep`; the pages of all drafters have one size."""

    features: Tensor  # [B, T, n·E]
    tables: tuple[Tensor, ...]  # [B, M], the page tables
    positions: Tensor  # [B, T]
    keep: Tensor  # [B, T]
    page_size: int

    @property
    def tensors(self) -> list[Tensor]:
        return [self.features, self.positions, self.keep, *self.tables]

    def with_tensors(self, tensors: Iterable[Tensor]) -> CommittedRows:
        """The same rows in other `tensors`."""
        features, positions, keep, *tables = tensors
        return CommittedRows(features, tuple(tables), positions, keep, self.page_size)

    def first(self, requests: int, length: int) -> CommittedRows:
        """A view of the first T = `length` rows of the first requests."""
        part, rows = self.with_tensors(tensor[:requests] for tensor in self.tensors), slice(length)
        features, positions, keep = (tensor[:, rows] for tensor in (part.features, part.positions, part.keep))
        return replace(part, features=features, positions=positions, keep=keep)

    @cached_property
    def rows(self) -> ContextRows:
        last = self.tables[0].shape[1] - 1  # rows not kept may be past it
        places = (self.positions // self.page_size).clamp(max=last)
        pages = tuple(torch.where(self.keep, table.gather(1, places), 0).flatten() for table in self.tables)
        return ContextRows(self.features.flatten(0, 1), self.positions.flatten(), pages)

    @property
    def before(self) -> Tensor:
        """[N] int64, the page of the position before each row, as `Chunks.pages` have it."""
        table = self.tables[0]
        places = ((self.positions - 1).clamp(min=0) // self.page_size).clamp(max=table.shape[1] - 1)
        return table.gather(1, places).flatten()


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """How much the pools of all models hold."""

    pages: int  # the scratch page 0 among them
    page_size: int
    windowed: int | None = None  # pages of layers with a window, found by a table of their own; None: as of the others
    states: int = 1  # of hybrids, state 0 among them

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of pages by page table."""
        return (self.pages,) if self.windowed is None else (self.pages, self.windowed)


class KVPool:
    """Keys and values of committed tokens, of all layers of a model that attend. Page 0 is the scratch page of padding
    rows. Layers are counted among those that attend.

    FP8 (E4M3) pools have a scale a layer for keys and one for values. Their rows' K/V must be rounded to what the pages
    hold before they attend (`d2sd.modeling.fp8.Fp8Cache`), so that a row has the same K/V before and after its commit.
    """

    def __init__(
        self,
        body: BodyConfig,
        sizes: PoolSizes,
        dtype: torch.dtype,
        device: str,
        fp8: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """For a model of this geometry, in `dtype` unless `fp8` has the scales (k_scale, v_scale), [L] fp32 each."""
        self._views = body.views
        self.scales = fp8  # (k_scale, v_scale) of FP8 pages, [L] fp32 each
        self.page_size, counts = sizes.page_size, sizes.counts
        stored = dtype if fp8 is None else torch.float8_e4m3fn
        tables = [int(len(counts) > 1 and window is not None) for window, _ in self._views]
        bodies = map(body.at, body.attention_layers)
        own = [(table, one.num_kv_heads, one.head_dim) for table, one in zip(tables, bodies, strict=True)]
        parts = []
        for table, *heads in sorted(set(own)) or [(0, body.num_kv_heads, body.head_dim)]:
            layers = tuple(layer for layer, which in enumerate(own) if which == (table, *heads))
            shape = (len(layers), counts[table], sizes.page_size, *heads)
            k, v = (torch.zeros(shape, dtype=stored, device=device) for _ in "kv")
            index = list(layers)
            scales: Scales = () if fp8 is None else (fp8[0][index], fp8[1][index])
            parts.append(PagePart(layers, table, k, v, scales))
        self._set(parts)
        self.states = None if body.recurrent is None else StatePool(body.recurrent, sizes.states, dtype, device)
        self.counters = counters(self.device)  # of attention, whose passes run in order

    def _set(self, parts: Sequence[PagePart]) -> None:
        self._parts = parts
        self._addresses: tuple[list[int], list[int]] | None = None
        self._places = {layer: (part, index) for part in parts for index, layer in enumerate(part.layers)}

    @property
    def k(self) -> Tensor:
        """[L, P, Z, Hkv, D], of a pool whose layers have one page table."""
        (part,) = self._parts
        return part.k

    @property
    def v(self) -> Tensor:
        """[L, P, Z, Hkv, D], of a pool whose layers have one page table."""
        (part,) = self._parts
        return part.v

    @property
    def tensors(self) -> list[Tensor]:
        """All memory: k and v of the layers of one page table and head size, then of the others'."""
        return [tensor for part in self._parts for tensor in (part.k, part.v)]

    @property
    def addresses(self) -> tuple[list[int], list[int]]:
        """Addresses of the pages of every layer, of keys and of values."""
        if self._addresses is None:
            places = [self._places[layer] for layer in range(len(self._places))]
            self._addresses = [part.k[i].data_ptr() for part, i in places], [part.v[i].data_ptr() for part, i in places]
        return self._addresses

    @property
    def device(self) -> torch.device:
        return self._parts[0].k.device

    @property
    def dtype(self) -> torch.dtype:
        return self._parts[0].k.dtype

    @property
    def pages(self) -> dict[int, int]:
        """Number of pages by the table that layers have: its place in `Where.tables`."""
        return {part.table: part.k.shape[1] for part in self._parts}

    def page_table(self, rows: Rows | Chunks, index: int | None = None) -> Tensor:
        """The page table [B, M] of layer `index`; None: of all layers of a pool that has one."""
        if index is None:
            (which,) = self.pages
        else:
            which = self._places[index][0].table
        return rows.where.tables[which]

    def from_layer(self, first: int, stop: int | None = None) -> KVPool:
        """The same memory without the layers before `first`, and those from `stop` on."""
        pool, layers = copy.copy(self), slice(first, stop)
        pool._views = self._views[layers]
        pool.scales = None if self.scales is None else (self.scales[0][layers], self.scales[1][layers])
        parts = [part.between(first, first + len(pool._views)) for part in self._parts]
        pool._set([part for part in parts if part.layers])
        return pool

    def write(
        self,
        k: Tensor,
        v: Tensor,
        tables: Sequence[Tensor],
        positions: Tensor,
        keep: Tensor,
        path: Tensor | None = None,
    ) -> None:
        """Commit rows k, v [L, B, T, Hkv, D] to the pages of `tables`; the others are arguments of `write_pages`."""
        for part in self._parts:
            part.write(k, v, tables[part.table], positions, keep, path)

    def paged(self, index: int, rows: CommittedRows) -> PagedRows:
        """Where `qk_norm_rope` is to put the keys and values of committed rows, of layer `index`."""
        part, place = self._places[index]
        return PagedRows(part.k[place], part.v[place], rows.tables[part.table], rows.positions, rows.keep)

    def write_rows(self, k: Tensor, v: Tensor, pages: Sequence[Tensor], positions: Tensor) -> None:
        """Commit rows k, v [L, N, Hkv, D] of any requests at `positions [N]`, whose `pages` are [N] by page table.

        Rows of page 0 are not kept.
        """
        in_page = (positions % self.page_size)[:, None]
        for part in self._parts:
            table = pages[part.table][:, None]
            part.write(k[:, :, None], v[:, :, None], table, in_page, table > 0)

    def attend(
        self, rows: Rows | Chunks, *, exact: bool = False, mask: AttnMask | ChunkMask | None = None
    ) -> Callable[..., Tensor]:
        """The attention of `rows` over this pool, layer by layer: `d2sd.modeling.layers.Attend`, which scales queries
        and writes to `out` as `cascade_attention` does, whose `exact` it has.

        `mask`: that of layers whose rows see all tokens, which something else reads as well; None: it is made here.
        """
        masks = {view: windowed(rows, *view, self.counters) for view in set(self._views) - {(None, False)}}
        masks[None, False] = windowed(rows, None, counters=self.counters) if mask is None else mask

        def attend(
            index: int,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            scale: Tensor | None = None,
            out: Tensor | None = None,
            *,
            sinks: Tensor | None = None,
        ) -> Tensor:
            mask, context = masks[self._views[index]], self.context(index, rows)
            return cascade_attention(q, k, v, context, mask, sinks=sinks, scale=scale, exact=exact, out=out)

        return attend

    def context(self, index: int, rows: Rows | Chunks) -> PagedContext:
        """The committed context of `rows` in layer `index`."""
        part, place = self._places[index]
        scales = () if not part.scales else (part.scales[0][place], part.scales[1][place])
        where = rows.where
        return PagedContext(part.k[place], part.v[place], where.tables[part.table], where.context_len, *scales)
