"""The attention op against an oracle that shares nothing with it: plain loops over requests, rows, heads and keys.

Shape letters: B requests, T rows, Hq/Hkv heads, D head size, P pages in the pool, Z tokens a page, M pages a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d2sd.modeling import kv_pool
from d2sd.modeling.kv_pool import Rows, windowed
from d2sd.modeling.where import Where
from d2sd.plugins.cascade_attention import AttnMask, ChunkMask, PagedContext, cascade_attention
from d2sd.plugins.cascade_attention.cpu import takes
from d2sd.plugins.cpu import library
from tests.tiny import ancestor_mask, random_tree


@dataclass(frozen=True)
class Call:
    """The op's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    context: PagedContext
    attn_mask: Tensor
    window: int | None = None
    depth: Tensor | None = None  # [B, T], with a window: rows before each in its path
    sinks: Tensor | None = None

    def run(self, *, exact: bool = False) -> Tensor:
        return cascade_attention(self.q, self.k, self.v, self.context, self.mask, sinks=self.sinks, exact=exact)

    @property
    def mask(self) -> AttnMask:
        """The mask that models make for the rows' positions."""
        context, depth = self.context, torch.zeros_like(self.attn_mask[..., 0]) if self.depth is None else self.depth
        length = context.context_len
        mask = windowed(Rows(length[:, None] + depth, self.attn_mask, Where(context.page_table, length)), self.window)
        assert isinstance(mask, AttnMask)
        return mask

    def over(self, **changes: Any) -> Call:
        """The same call over another context, by the fields that differ."""
        return replace(self, context=replace(self.context, **changes))

    def to(self, dtype: torch.dtype) -> Call:
        floats = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v")}
        pages = {name: getattr(self.context, name).to(dtype) for name in ("k_pages", "v_pages")}
        return replace(self, **floats).over(**pages)

    def chunks(self, lengths: tuple[int, ...]) -> Chunks:
        """The first rows of each request of a causal call, as chunks of prompts, and where they are in [B, T]."""
        rows = torch.arange(self.q.shape[1]) < torch.tensor(lengths)[:, None]
        starts = torch.tensor([0, *accumulate(lengths)])
        q, k, v = (x[rows][None] for x in (self.q, self.k, self.v))
        where = Where(self.context.page_table, self.context.context_len)
        positions = (where.context_len[:, None] + torch.arange(self.q.shape[1]))[rows]
        chunks = kv_pool.Chunks(ChunkMask(lengths, starts), positions[None], where, (positions,))
        mask = windowed(chunks, self.window)
        assert isinstance(mask, ChunkMask)
        return Chunks(q, k, v, self.context, mask, rows, self.sinks)

    def requests(self, order: list[int]) -> Call:
        """The same call with its requests reordered, over the same pool."""
        names = "q", "k", "v", "attn_mask", *(() if self.depth is None else ("depth",))
        mine = {name: getattr(self, name)[order] for name in names}
        return replace(self, **mine).over(**{n: getattr(self.context, n)[order] for n in ("page_table", "context_len")})


@dataclass(frozen=True)
class Chunks:
    """The op's arguments for chunks of prompts."""

    q: Tensor
    k: Tensor
    v: Tensor
    context: PagedContext
    mask: ChunkMask
    rows: Tensor  # [B, T] bool
    sinks: Tensor | None = None

    def run(self, *, exact: bool = False) -> Tensor:
        return cascade_attention(self.q, self.k, self.v, self.context, self.mask, sinks=self.sinks, exact=exact)


@dataclass(frozen=True)
class Shape:
    """One request per entry of `contexts`; no two default sizes are equal, so that none can stand in for another."""

    contexts: tuple[int, ...] = (9, 4)
    rows: int = 5
    kv_heads: int = 2
    group: int = 3
    size: int = 8
    page_size: int = 4
    spare_pages: int = 1  # page-table columns past the longest context, as a bucket leaves them


def causal(rows: int, _: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()


def itself(rows: int, _: int) -> Tensor:
    return torch.eye(rows, dtype=torch.bool)


def everyone(rows: int, _: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool)


def branches(rows: int, _: int) -> Tensor:
    """Blocks of two rows; the last one is cut short where `rows` is odd."""
    return (torch.arange(rows)[:, None] // 2) == (torch.arange(rows) // 2)


def ancestors(rows: int, seed: int) -> Tensor:
    """Another random tree for every request."""
    return ancestor_mask(random_tree(rows, seed))


Mask = Callable[[int, int], Tensor]
MASKS: list[Mask] = [causal, itself, everyone, branches, ancestors]


def make(shape: Shape, mask: Mask = causal, seed: int = 0) -> Call:
    """Random numbers; pages in random order; every slot that no request owns holds NaN."""
    contexts, rows, kv_heads, group, size, page_size, spare_pages = astuple(shape)
    g = torch.Generator().manual_seed(seed)
    columns = max(-(-max(contexts) // page_size), 1) + spare_pages
    pages = 1 + len(contexts) * columns
    k_pages = torch.full((pages, page_size, kv_heads, size), torch.nan)
    v_pages = k_pages.clone()
    page_table = torch.randperm(pages, generator=g)[: len(contexts) * columns].view(len(contexts), columns)
    for table, context in zip(page_table, contexts, strict=True):
        for token in range(context):
            page, slot = table[token // page_size], token % page_size
            k_pages[page, slot] = torch.randn(kv_heads, size, generator=g)
            v_pages[page, slot] = torch.randn(kv_heads, size, generator=g)
    return Call(
        q=torch.randn(len(contexts), rows, kv_heads * group, size, generator=g),
        k=torch.randn(len(contexts), rows, kv_heads, size, generator=g),
        v=torch.randn(len(contexts), rows, kv_heads, size, generator=g),
        context=PagedContext(k_pages, v_pages, page_table, torch.tensor(contexts)),
        attn_mask=torch.stack([mask(rows, seed + request) for request in range(len(contexts))]),
    )


def steps(mask: Mask, call: Call) -> Tensor:
    """Depths of the rows of a call that `mask` made, [B, T]."""
    rows = torch.arange(call.q.shape[1])
    depths = {everyone: rows, branches: rows % 2, itself: rows * 0}
    return depths[mask].expand(len(call.q), -1) if mask in depths else call.attn_mask.sum(-1) - 1


def behind(call: Call, window: int | None, depth: Tensor, *, sinks: bool = False, seed: int = 7) -> Call:
    """The call with a window. In front of all rows' slots hold NaN; pages there are page 0 or any other."""
    g = torch.Generator().manual_seed(seed)
    heads, context = call.q.shape[2], call.context
    given = torch.randn(heads, generator=g) if sinks else None
    if window is None:
        return replace(call, sinks=given)
    k_pages, v_pages, table = context.k_pages.clone(), context.v_pages.clone(), context.page_table.clone()
    page_size = k_pages.shape[1]
    for request, length in enumerate(context.context_len.tolist()):
        front = max(0, length - (window - 1))
        for token in range(front):
            page, slot = table[request, token // page_size], token % page_size
            k_pages[page, slot] = v_pages[page, slot] = torch.nan
        freed = front // page_size
        table[request, :freed] = torch.randint(len(k_pages), (freed,), generator=g) * (request % 2)
    narrow = replace(call, window=window, depth=depth, sinks=given)
    return narrow.over(k_pages=k_pages, v_pages=v_pages, page_table=table)


def oracle(call: Call) -> Tensor:
    """The definition, one query at a time, in float64. [B, T, Hq, D]."""
    context = call.context
    q, k, v, k_pages, v_pages = (x.double().numpy() for x in (call.q, call.k, call.v, context.k_pages, context.v_pages))
    batch, rows, heads, size = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    out = np.zeros(q.shape)
    for b in range(batch):
        for t in range(rows):
            for h in range(heads):
                kv_head = h // (heads // kv_heads)
                keys: list[Any] = []
                values: list[Any] = []
                length = int(context.context_len[b])
                for token in range(length):
                    if not near(call, b, t, token - length):
                        continue
                    page, slot = int(context.page_table[b, token // page_size]), token % page_size
                    keys.append(k_pages[page, slot, kv_head])
                    values.append(v_pages[page, slot, kv_head])
                for u in range(rows):
                    if call.attn_mask[b, t, u] and near(call, b, t, 0 if call.depth is None else int(call.depth[b, u])):
                        keys.append(k[b, u, kv_head])
                        values.append(v[b, u, kv_head])
                scores = [float(np.dot(q[b, t, h], key)) / np.sqrt(size) for key in keys]
                scores += [] if call.sinks is None else [float(call.sinks[h])]
                weights = [np.exp(score - max(scores)) for score in scores]
                for weight, value in zip(weights, values, strict=call.sinks is None):  # a sink is the last, without one
                    out[b, t, h] += weight / sum(weights) * value
    return torch.from_numpy(out)


def near(call: Call, request: int, row: int, step: int) -> bool:
    """Whether a row sees so many rows before or behind the end of its context."""
    return call.window is None or call.depth is None or int(call.depth[request, row]) - step < call.window


def assert_matches_oracle(call: Call) -> None:
    torch.testing.assert_close(call.run().double(), oracle(call), rtol=1e-5, atol=1e-5)


SHAPES = [
    pytest.param(Shape(group=1), id="every query head has its own K/V head (MHA)"),
    pytest.param(Shape(group=2), id="GQA 2:1, as Qwen3-0.6B"),
    pytest.param(Shape(group=3), id="GQA 3:1, as SmolLM2-135M: not a power of two"),
    pytest.param(Shape(group=4), id="GQA 4:1, as Llama-3.1-8B and Qwen3-8B"),
    pytest.param(Shape(kv_heads=1, group=4), id="one K/V head for all (MQA)"),
    pytest.param(Shape(kv_heads=3, group=3, size=64, contexts=(7,)), id="SmolLM2's heads: 9 over 3, size 64"),
    pytest.param(Shape(contexts=(0, 0)), id="no context anywhere: a prompt's first chunk"),
    pytest.param(Shape(contexts=(8, 4)), id="pages full to the brim"),
    pytest.param(Shape(contexts=(5, 7)), id="last page partly filled: by one slot, and all but one"),
    pytest.param(Shape(contexts=(0, 1, 4, 13)), id="lengths that differ in one batch, none and one among them"),
    pytest.param(Shape(rows=1), id="one row: plain decoding"),
    pytest.param(Shape(rows=1, contexts=(0,)), id="one row that sees itself alone: the softmax is 1"),
    pytest.param(Shape(rows=9, contexts=(3,)), id="more rows than context: prefill"),
    pytest.param(Shape(page_size=1, contexts=(5, 2)), id="pages of one token: any order must do"),
    pytest.param(Shape(page_size=16, contexts=(9, 4)), id="one page holds more than the context"),
    pytest.param(Shape(spare_pages=0, contexts=(8,)), id="page table without a spare column"),
    pytest.param(Shape(spare_pages=5), id="a bucket far wider than the contexts"),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_oracle(shape: Shape, mask: Mask) -> None:
    assert_matches_oracle(make(shape, mask))


@pytest.mark.skipif(not library.available(), reason="no C compiler")
@pytest.mark.parametrize("shape", [Shape(size=size, kv_heads=2, group=5) for size in (16, 272, 512)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_the_library_attends_with_heads_of_up_to_512(shape: Shape, mask: Mask) -> None:
    call = make(shape, mask)
    assert takes(call.q, call.context)
    torch.testing.assert_close(call.run(exact=True).double(), oracle(call), rtol=1e-5, atol=1e-5)


#: One token, part of a page, pages, more than any context: the last end among the rows or in front of all keys.
WINDOWS = [1, 2, 3, 6, 13, 40]


@pytest.mark.parametrize("lengths", [(5, 1, 3), (1, 1, 1), (2, 6, 4)])
@pytest.mark.parametrize("window", [None, *WINDOWS])
def test_chunks_of_prompts_equal_oracle(lengths: tuple[int, ...], window: int | None) -> None:
    call = make(Shape(contexts=(9, 0, 4), rows=6))
    call = behind(call, window, steps(causal, call), sinks=window is not None and window % 2 == 0)
    chunks = call.chunks(lengths)
    torch.testing.assert_close(chunks.run()[0].double(), oracle(call)[chunks.rows], rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_equal_oracle(window: int, mask: Mask, sinks: bool) -> None:
    """Trees of six rows, whose paths are longer than a window of three; contexts of no, one and some pages."""
    call = make(Shape(contexts=(0, 1, 13, 8), rows=6), mask)
    assert_matches_oracle(behind(call, window, steps(mask, call), sinks=sinks))


@pytest.mark.parametrize("sink", [-1e30, -1e4, 1e4])
def test_sinks_of_any_size(sink: float) -> None:
    """One far below all scores is none, one far above takes all weight."""
    call = make(Shape(), ancestors)
    heads = call.q.shape[2]
    found = replace(call, sinks=torch.full((heads,), sink)).run()
    assert torch.equal(found, call.run() if sink < 0 else torch.zeros_like(found))


@settings(max_examples=25, deadline=None, derandomize=True)  # the same examples in every run: CI must not flicker
@given(
    shape=st.builds(
        Shape,
        contexts=st.lists(st.integers(0, 11), min_size=1, max_size=3).map(tuple),
        rows=st.integers(1, 6),
        kv_heads=st.integers(1, 2),
        group=st.integers(1, 4),
        size=st.sampled_from([2, 4, 6]),
        page_size=st.integers(1, 5),
        spare_pages=st.integers(0, 2),
    ),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 99),
)
def test_equals_oracle_on_any_shape(shape: Shape, mask: Mask, seed: int) -> None:
    assert_matches_oracle(make(shape, mask, seed))


def test_large_scores_do_not_overflow() -> None:
    """Scores of thousands, which fp32 resolves to 1e-3: exp() without subtracting the maximum is inf."""
    call = make(Shape(), everyone)
    call = replace(call, q=call.q * 1e3)
    torch.testing.assert_close(call.run().double(), oracle(call), rtol=0, atol=5e-3)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_unused_slots_are_never_read(garbage: float) -> None:
    """The rest of a last page, pages of nobody, and whatever spare page-table columns point at."""
    call = make(Shape(contexts=(5, 8), spare_pages=2), everyone)
    k_pages, v_pages = call.context.k_pages, call.context.v_pages
    unused = k_pages.isnan()
    clean = call.over(k_pages=k_pages.nan_to_num(0), v_pages=v_pages.nan_to_num(0)).run()
    dirty = call.over(k_pages=k_pages.masked_fill(unused, garbage), v_pages=v_pages.masked_fill(unused, garbage))
    assert torch.equal(dirty.run(), clean)
    assert not torch.equal(call.over(context_len=call.context.context_len - 1).run(), clean)  # the used ones are read


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("exact", [False, True], ids=["reference", "compiled"])
def test_a_key_whose_score_is_no_number_is_not_hidden(number: float, sinks: bool, exact: bool) -> None:
    """Scores of NaN, and of infinity minus infinity, end as NaN, however small their weights."""
    call = behind(make(Shape(size=16), ancestors), None, torch.zeros(0), sinks=sinks)
    call.k[1, 2, 0] = number
    call.q[1] = torch.where(torch.arange(16) % 2 == 0, 9.0, -8.0) if number == torch.inf else 9.0
    found = call.run(exact=exact)
    assert found[1, call.attn_mask[1, :, 2]][:, :3].isnan().all()
    assert found[0].isfinite().all()
    assert found[1, ~call.attn_mask[1, :, 2]].isfinite().all()


#: A broken row's numbers, and whether its values are still values: huge ones are.
BROKEN = [(torch.nan, False), (torch.inf, False), (-torch.inf, False), (3e38, True)]


def spoiled(call: Call, request: int, row: int, number: float, *, keys: bool) -> Call:
    """The call whose row has this number in its values, in one or all; and in its keys."""
    k, v = call.k.clone(), call.v.clone()
    v[request, row, 0, : 1 if row % 2 else None] = number
    if keys:
        k[request, row, 0] = number
    return replace(call, k=k, v=v)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("number", "whole"), BROKEN)
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("exact", [False, True], ids=["reference", "compiled"])
def test_a_broken_row_reaches_those_who_see_it(mask: Mask, number: float, whole: bool, keys: bool, exact: bool) -> None:
    """Results of rows that see it are not finite, and no bit of the others changes."""
    healthy = make(Shape(contexts=(9, 0, 4), rows=6, size=16), mask)
    healthy = behind(healthy, 4, steps(mask, healthy), sinks=keys)
    for row in range(6):
        call = spoiled(healthy, 1, row, number, keys=keys)
        found, expected = call.run(exact=exact), healthy.run(exact=exact)
        reached = torch.zeros(3, 6, dtype=torch.bool)
        reached[1] = call.mask.allowed[1, :, row]
        assert torch.equal(found[~reached], expected[~reached])
        if not whole:
            assert not found[reached][:, : call.q.shape[2] // 2].isfinite().flatten(1).all(1).any()


@pytest.mark.parametrize("exact", [False, True], ids=["reference", "compiled"])
@pytest.mark.parametrize("place", [0, 4, 6, 8, 11])
def test_a_broken_token_reaches_the_rows_whose_windows_have_it(place: int, exact: bool) -> None:
    """Some rows of a pass see it, in a page or among them, and others do not, in front of it and behind."""
    call = make(Shape(contexts=(9,), rows=7, size=16), causal)
    call = behind(call, 5, steps(causal, call))
    k_pages, v_pages = call.context.k_pages.clone(), call.context.v_pages.clone()
    if place < 9:
        v_pages[call.context.page_table[0, place // 4], place % 4] = torch.nan
        broken = call.over(k_pages=k_pages, v_pages=v_pages)
    else:
        broken = spoiled(call, 0, place - 9, torch.nan, keys=False)
    reached = torch.tensor([place <= 9 + row < place + 5 for row in range(7)])
    for lengths in ((), (7,)):
        found, expected = ((x.chunks(lengths) if lengths else x).run(exact=exact) for x in (broken, call))
        assert torch.equal(found[0, ~reached], expected[0, ~reached])
        assert found[0, reached].isnan().flatten(1).any(1).all()


def test_spare_columns_of_the_page_table_change_nothing() -> None:
    """A bucket is wider than its requests; the entries past their contexts may name pages of other requests."""
    call = make(Shape(contexts=(5, 8), spare_pages=0))
    others = call.context.page_table.flip(0)
    wide = call.over(page_table=torch.cat([call.context.page_table, others], dim=1))
    torch.testing.assert_close(wide.run(), call.run(), rtol=0, atol=1e-6)


def test_fp8_pages_read_as_numbers_times_their_scale() -> None:
    """NaN in unused slots stays NaN in FP8, and unread."""
    call, k_scale, v_scale = make(Shape(), ancestors), torch.tensor(0.011), torch.tensor(0.007)
    k_pages, v_pages = (pages.to(torch.float8_e4m3fn) for pages in (call.context.k_pages, call.context.v_pages))
    plain = call.over(k_pages=k_pages.double() * k_scale.double(), v_pages=v_pages.double() * v_scale.double())
    found = call.over(k_pages=k_pages, v_pages=v_pages, k_scale=k_scale, v_scale=v_scale).run()
    torch.testing.assert_close(found.double(), oracle(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [causal, ancestors])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(contexts=(40, 13), size=64), id="a context long enough to add up rounding"),
        pytest.param(Shape(contexts=(0, 3), group=3), id="hardly any context, where rounding of inputs is all"),
    ],
)
def test_low_precision_stays_within_its_error_budget(shape: Shape, mask: Mask, dtype: torch.dtype) -> None:
    """At most twice the error of PyTorch working in the same dtype throughout (the rule of flash-attention's tests)."""
    call = make(shape, mask).to(dtype)
    exact = oracle(call)
    out = call.run()
    assert out.dtype == dtype
    budget = 2 * (low_precision(call).double() - exact).abs().max() + 1e-5
    assert (out.double() - exact).abs().max() <= budget


def low_precision(call: Call) -> Tensor:
    """The op in plain PyTorch, every intermediate result rounded to the inputs' dtype."""
    heads, size = call.q.shape[2:]
    group = heads // call.k.shape[2]
    out = torch.empty_like(call.q)
    for request, context in enumerate(call.context.context_len.tolist()):
        table = call.context.page_table[request]
        keys = torch.cat([call.context.k_pages[table].flatten(0, 1)[:context], call.k[request]])
        values = torch.cat([call.context.v_pages[table].flatten(0, 1)[:context], call.v[request]])
        seen = torch.cat([torch.ones(call.q.shape[1], context, dtype=torch.bool), call.attn_mask[request]], dim=1)
        for head in range(heads):
            scores = call.q[request, :, head] @ keys[:, head // group].T * size**-0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[request, :, head] = weights @ values[:, head // group]
    return out
