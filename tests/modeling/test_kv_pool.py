"""The pool and its rows: which slot a committed token takes, which stay untouched, and what FP8 pages give back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.fp8 import Fp8Linear, kv_scales
from d2sd.modeling.kv_pool import Chunks, KVPool, PoolSizes, Rows
from d2sd.modeling.layers import Attention
from d2sd.modeling.where import Where
from d2sd.plugins.shared.fp8 import from_pages, to_pages
from tests.tiny import (
    ancestor_mask,
    bare_pool,
    feed,
    in_fp8,
    pool_for,
    random_tokens,
    random_tree,
    tiny_decoder,
    tiny_drafter,
)


def test_write_puts_each_row_at_its_token() -> None:
    """Two layers, two requests whose pages interleave, positions out of order; a row not kept lands in page 0."""
    pool = bare_pool(2, 5, 2, 1, 1)
    page_table = torch.tensor([[3, 1], [2, 4]])
    positions = torch.tensor([[2, 1, 1], [3, 0, 2]])
    keep = torch.tensor([[True, True, False], [True, True, True]])
    values = torch.tensor([[[10.0, 11, 12], [20, 21, 22]], [[30, 31, 32], [40, 41, 42]]])  # [L, B, T]
    values = values.view(2, 2, 3, 1, 1)
    pool.write(values, -values, (page_table,), positions, keep)
    expected = torch.tensor(
        [
            # page 1      2         3         4
            [[10.0, 0], [21, 0], [0, 11], [22, 20]],
            [[30.0, 0], [41, 0], [0, 31], [42, 40]],
        ]
    ).view(2, 4, 2, 1, 1)
    assert torch.equal(pool.k[:, 1:], expected)
    assert torch.equal(pool.v[:, 1:], -expected)


def test_padding_may_stand_past_the_last_page() -> None:
    """Bucket padding carries any position; not kept, it must neither fail nor touch a page of the request."""
    pool = bare_pool(1, 2, 2, 1, 1)
    one = torch.ones(1, 1, 1, 1, 1)
    pool.write(one, one, (torch.tensor([[1]]),), torch.tensor([[99]]), torch.tensor([[False]]))
    assert not pool.k[:, 1:].any()
    assert not pool.v[:, 1:].any()


def fp8_target(dtype: torch.dtype, *, gain: float = 1.0) -> Decoder:
    """A tiny target whose layers and K/V are FP8, with other scales in every layer; large K/V saturate."""
    plain = tiny_decoder("qwen3", tie=False).to(dtype)
    model = in_fp8(plain, cache=True)
    attentions: list[Any] = [layer for layer in model.modules() if isinstance(layer, Attention)]
    for index, attention in enumerate(attentions):
        attention.k_cache.scale = torch.tensor(0.013 * gain * (index + 1))
        attention.v_cache.scale = torch.tensor(0.007 * gain * (index + 2))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [3.1e-5, 0.0031, 0.011, 0.25, 1.7])
def test_every_fp8_value_survives_its_commit(dtype: torch.dtype, scale: float) -> None:
    """A row's K/V, rounded to pages before it attends, is committed to the same E4M3 numbers and read back unchanged.

    3.1e-5 is the least scale at which fp16 still tells the smallest E4M3 numbers apart.
    """
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()]
    rows = from_pages(numbers, torch.tensor(scale), dtype)
    again = to_pages(rows, torch.tensor(scale))
    assert torch.equal(again.float(), numbers.float())
    assert torch.equal(from_pages(again, torch.tensor(scale), dtype), rows)


def test_scales_of_a_models_pages() -> None:
    model = fp8_target(torch.bfloat16)
    scales = kv_scales(model)
    assert scales is not None
    torch.testing.assert_close(scales[0], torch.tensor([0.013, 0.026, 0.039]))
    torch.testing.assert_close(scales[1], torch.tensor([0.014, 0.021, 0.028]))
    assert kv_scales(tiny_decoder()) is None
    assert kv_scales(tiny_drafter(model.config)) is None
    pool = KVPool(model.config.body, PoolSizes(5, 4), torch.bfloat16, "cpu", fp8=scales)
    assert pool.k.dtype == pool.v.dtype == torch.float8_e4m3fn
    wide = KVPool(model.config.body, PoolSizes(5, 4), torch.bfloat16, "cpu")
    assert 2 * (pool.k.nbytes + pool.v.nbytes) == wide.k.nbytes + wide.v.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gain", [1.0, 0.1])
def test_fp8_pages_are_bit_identical_to_rounded_wide_pages(dtype: torch.dtype, gain: float) -> None:
    """Prefill, a tree, a committed path and the next step, over E4M3 pages and over the model's dtype."""
    model = fp8_target(dtype, gain=gain)
    tokens = random_tokens(model, 2, 20)
    tree = ancestor_mask(random_tree(6, seed=3))
    found = []
    for scales in (None, kv_scales(model)):
        pool, table = pool_for(model.config.body, 2, 24, dtype=dtype, fp8=scales)
        outs = [feed(model, tokens[:, :7], pool, table, torch.zeros(2, dtype=torch.long))]
        context = torch.full((2,), 7)
        rows = Rows(context[:, None] + tree.sum(-1) - 1, tree.expand(2, 6, 6), Where(table, context))
        outs.append(model(tokens[:, 7:13], rows, pool))
        path = torch.tensor([[0, 1], [0, 2]])
        places = context[:, None] + torch.arange(2)
        pool.write(outs[1].k, outs[1].v, (table,), places, torch.ones(2, 2, dtype=torch.bool), path)
        outs.append(feed(model, tokens[:, 13:17], pool, table, context + 2))
        found.append(outs)
    for wide, fp8 in zip(*found, strict=True):
        assert torch.equal(fp8.hidden, wide.hidden)
        assert torch.equal(fp8.k, wide.k)
        assert torch.equal(fp8.v, wide.v)


def test_a_row_attends_to_the_same_values_before_and_after_its_commit() -> None:
    """One pass over a text, and one token a pass over FP8 pages."""
    model = fp8_target(torch.float32).double()  # nothing but FP8 rounds: no sum lands on another side of a tie
    for module in model.modules():
        if isinstance(module, Fp8Linear):  # double() has widened what is FP8
            module.weight.data = module.weight.data.to(torch.float8_e4m3fn)
    tokens = random_tokens(model, 2, 9)
    whole = model.full_pass(tokens).hidden
    pool, table = pool_for(model.config.body, 2, 9, dtype=torch.float64, fp8=kv_scales(model))
    steps = [
        feed(model, tokens[:, t : t + 1], pool, table, torch.full((2,), t, dtype=torch.long)).hidden for t in range(9)
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-9, atol=1e-9)


def test_chain_follows_each_context() -> None:
    rows = Rows.chain(3, Where(torch.tensor([[1], [2]]), torch.tensor([0, 5])))
    assert rows.positions.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert rows.attn_mask.tolist() == 2 * [[[True, False, False], [True, True, False], [True, True, True]]]


def test_chunks_follow_each_context_one_behind_the_other() -> None:
    where = Where(torch.tensor([[7, 3], [2, 0], [9, 4]]), torch.tensor([0, 1, 3]))
    rows = Chunks.of([3, 1, 2], where, page_size=4)
    assert rows.attn_mask.starts.tolist() == [0, 3, 4, 6]
    assert rows.attn_mask.spans() == [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert rows.positions.tolist() == [[0, 1, 2, 1, 3, 4]]
    before = [7, 7, 7, 2, 9, 9]  # of the positions before
    assert [pages.tolist() for pages in rows.pages] == [[7, 7, 7, 2, 9, 4], before]


WINDOWED = {
    "none": (None, None, None, None),
    "all": (4, 6, 6, 4),
    "every other": (4, None, 6, None),
    "first and last": (4, None, None, 4),
    "uneven": (None, 5, 5, None),
    "most": (4, 4, None, 5),
}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("windows", WINDOWED.values(), ids=WINDOWED)
def test_layers_with_a_window_may_have_pages_of_their_own(windows: tuple[int | None, ...], fp8: bool) -> None:
    """Two prompts, a tree and the next tokens; pages behind all windows are page 0, and all free ones hold NaN."""
    model = tiny_decoder(layers=4, windows=windows)
    body, tokens, tree = model.config.body, random_tokens(model, 2, 24), ancestor_mask(random_tree(6, seed=3))
    scales = (torch.linspace(0.01, 0.04, 4), torch.linspace(0.02, 0.03, 4)) if fp8 else None
    table = 1 + torch.randperm(12, generator=torch.Generator().manual_seed(1)).view(2, 6)
    context, found = torch.tensor([11, 9]), []
    for windowed_pages in (None, 8):
        pool, own = KVPool(body, PoolSizes(13, 4, windowed=windowed_pages), torch.float32, "cpu", fp8=scales), None
        if windowed_pages is not None:
            own = torch.tensor([[5, 2, 7, 0, 0, 0], [1, 6, 3, 0, 0, 0]])
        for pages in pool.tensors:
            pages.copy_(torch.full(pages.shape, torch.nan))
        prompts = torch.cat([tokens[0, :11], tokens[1, :9]])[None]
        chunks = Chunks.of(context.tolist(), Where(table, torch.zeros(2, dtype=torch.long), windowed=own), 4)
        outs = [model(prompts, chunks, pool)]
        pool.write_rows(outs[0].k[:, 0], outs[0].v[:, 0], chunks.pages, chunks.positions[0])
        if own is not None:  # tokens 0 .. 3 of each are behind the windows; their pages are those of the next tokens
            own = torch.tensor([[0, 2, 7, 5, 4, 0], [0, 6, 3, 1, 0, 0]])
            for pages in (pages for part in pool._parts if part.table for pages in (part.k, part.v)):
                for page in (0, 5, 1, 4):
                    pages[:, page].copy_(torch.full(pages[:, 0].shape, torch.nan))
        where = Where(table, context, own)
        rows = Rows(context[:, None] + tree.sum(-1) - 1, tree.expand(2, 6, 6), where)
        outs.append(model(tokens[:, 11:17], rows, pool))
        path, places = torch.tensor([[0, 1], [0, 2]]), context[:, None] + torch.arange(2)
        keep = torch.ones(2, 2, dtype=torch.bool)
        pool.write(outs[1].k, outs[1].v, where.tables, places, keep, path)
        after = Rows.chain(2, where.after(2))
        outs.append(model(tokens[:, 17:19], after, pool))
        found.append(outs)
        assert set(pool.pages) == ({int(window is not None) for window in windows} if windowed_pages else {0})
        part = pool.from_layer(1, 3)
        for index in range(2):
            assert part.context(index, after).k_pages.data_ptr() == pool.context(1 + index, after).k_pages.data_ptr()
            assert torch.equal(part.page_table(after, index), pool.page_table(after, 1 + index))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.hidden, other.hidden)
        assert not one.hidden.isnan().any()
