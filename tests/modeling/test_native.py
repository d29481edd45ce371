"""Layers as one call of the compiled kernels: the values are PyTorch's, and the bits are each row's own."""

from __future__ import annotations

import copy
import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from d2sd.modeling import native
from d2sd.modeling.config import Family
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.kv_pool import Chunks, KVPool, PoolSizes, Rows
from d2sd.modeling.native import NativeLayers, pack
from d2sd.modeling.where import Where
from d2sd.plugins.cpu import library
from tests.tiny import random_tokens, tiny_decoder, tiny_drafter

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")

AUX = (0, 2)
#: Heads, K/V heads and their size: sizes with kernels of their own and others, groups of 1 to 6 query heads.
HEADS = [(4, 2, 16), (3, 3, 16), (6, 1, 32), (9, 3, 64), (5, 1, 64), (4, 2, 128), (3, 1, 256)]


def packed(model: Decoder) -> Decoder:
    made = copy.deepcopy(model)
    pack(made)
    assert made.compiled is not None
    return made


def filled(decoder: Decoder, tokens: torch.Tensor, page_size: int = 4) -> tuple[KVPool, torch.Tensor]:
    """A pool with the K/V of tokens [B, S] in pages out of order, and the page table [B, M] with room for more."""
    batch, length = tokens.shape
    width = (length + 64) // page_size
    weight = decoder.embed_tokens.weight
    pool = KVPool(decoder.config.body, PoolSizes(1 + batch * width, page_size), weight.dtype, "cpu")
    pool.k.fill_(torch.nan)
    pool.v.fill_(torch.nan)
    table = 1 + torch.randperm(batch * width).view(batch, width)
    rows = Rows.chain(length, Where(table, torch.zeros(batch, dtype=torch.long)))
    out = decoder(tokens, rows, pool, AUX)
    pool.write(out.k, out.v, (table,), rows.positions, torch.ones(batch, length, dtype=torch.bool))
    return pool, table


def random_tree(batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths [B, T] and ancestor masks [B, T, T] of random trees, the same in every run."""
    draw = torch.Generator().manual_seed(count)
    depth, mask = torch.zeros(batch, count, dtype=torch.long), torch.eye(count, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        for t in range(1, count):
            parent = int(torch.randint(max(0, t - 4), t, (), generator=draw))
            depth[b, t] = depth[b, parent] + 1
            mask[b, t] |= mask[b, parent]
    return depth, mask


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_family_gives_the_values_of_pytorch(family: Family) -> None:
    hidden = 64 if family == "qwen2" else 40
    plain = tiny_decoder(family, hidden=hidden, heads=4, kv_heads=2, head_dim=16, attention_bias=family != "qwen2")
    compare(plain)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_every_geometry_of_heads(heads: int, kv_heads: int, size: int) -> None:
    compare(tiny_decoder("qwen3", heads=heads, kv_heads=kv_heads, head_dim=size))


#: Of three layers: one token, part of a page, pages, more than any context; in turns with none.
WINDOWS: list[tuple[int | None, ...]] = [(1, 3, None), (None, 6, None), (4, 9, 4), (2, 18, 100), (5, 5, 5)]


@pytest.mark.parametrize("windows", [*WINDOWS, ()], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_and_sinks(windows: tuple[int | None, ...], sinks: bool) -> None:
    compare(tiny_decoder("qwen3", heads=6, head_dim=16, windows=windows, sinks=sinks))


def compare(plain: Decoder) -> None:
    """Trees and chunks of prompts behind contexts of different lengths."""
    native, tokens = packed(plain), random_tokens(plain, 3, 33)
    pools = [filled(model, tokens) for model in (plain, native)]
    depth, mask = random_tree(3, 14)
    context = torch.tensor([33, 1, 17])
    rows, prompts = random_tokens(plain, 3, 14), random_tokens(plain, 1, 17)
    trees, chunks = [], []
    for model, (pool, table) in zip((plain, native), pools, strict=True):
        trees.append(model(rows, Rows(context[:, None] + depth, mask, Where(table, context)), pool, AUX))
        chunks.append(model(prompts, Chunks.of([5, 1, 11], Where(table, context), pool.page_size), pool, AUX))
    for expected, found in (trees, chunks):
        for name in ("hidden", "features", "k", "v"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("needed", [(14, 1, 5), (1, 1, 1), (3, 14, 14)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("windows", [(), (None, 3, 7)], ids=str)
def test_rows_that_are_not_needed_change_none(
    needed: tuple[int, ...], dtype: torch.dtype, windows: tuple[int | None, ...]
) -> None:
    """Bit for bit: what else is computed with a row does not matter."""
    native = packed(tiny_decoder("qwen3", hidden=40, heads=4, kv_heads=2, head_dim=16, windows=windows).to(dtype))
    pool, table = filled(native, random_tokens(native, 3, 33))
    depth, mask = random_tree(3, 14)
    context = torch.tensor([33, 1, 17])
    asked, tokens = Rows(context[:, None] + depth, mask, Where(table, context)), random_tokens(native, 3, 14)
    every, few = (native(tokens, rows, pool, AUX) for rows in (asked, replace(asked, needed=needed)))
    for name, axis in (("hidden", 0), ("features", 0), ("k", 1), ("v", 1)):
        expected, found = (getattr(out, name).movedim(axis, 0) for out in (every, few))
        for request, count in enumerate(needed):
            rows = (request, slice(count)) if not axis else (request, slice(None), slice(count))
            assert torch.equal(found[rows], expected[rows]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near_the_same_weights_in_fp32(dtype: torch.dtype) -> None:
    plain = tiny_decoder("qwen3", head_dim=16).to(dtype)
    tokens = random_tokens(plain, 2, 12)
    wide = copy.deepcopy(plain).float().full_pass(tokens)
    found = packed(plain).full_pass(tokens)
    assert found.hidden.dtype == found.k.dtype == dtype
    scale = wide.hidden.abs().max()
    assert (found.hidden.float() - wide.hidden).abs().max() < scale * (0.03 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [16, 64])
def test_bits_of_a_row_are_its_own(dtype: torch.dtype, size: int) -> None:
    """In a tree, in a prompt beside other requests, with any threads and pages: as one token after the other."""
    check_bits(packed(tiny_decoder("qwen3", head_dim=size, heads=6).to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_row_behind_a_window_are_its_own(dtype: torch.dtype) -> None:
    """Windows end among the rows of a tree, within a page, and at the end of another."""
    check_bits(packed(tiny_decoder("qwen3", head_dim=16, heads=6, windows=(4, 19, 16), sinks=True).to(dtype)))


def check_bits(decoder: Decoder) -> None:
    context, text, count = 21, random_tokens(decoder, 1, 60), 60
    pool, table = filled(decoder, text[:, :context])
    path = text[0, context:].tolist()
    alone = one_by_one(decoder, text, context)
    depth, mask = random_tree(1, count)
    leaf = int(depth.argmax())
    chain = mask[0, leaf].nonzero()[:, 0]  # of the deepest node
    tokens = random_tokens(decoder, 1, count)
    tokens[0, chain] = torch.tensor(path[: len(chain)])
    length = torch.tensor([context])
    tree = decoder(tokens, Rows(length[:, None] + depth, mask, Where(table, length)), pool, AUX)
    assert len(chain) >= 8
    for place, node in enumerate(chain.tolist()):
        assert torch.equal(tree.hidden[0, node], alone[place][0]), place
        assert torch.equal(tree.k[:, 0, node], alone[place][1]), place
    chunks = Chunks.of([4, 39, 9], Where(table.expand(3, -1), torch.tensor([9, context, context])), pool.page_size)
    prompts = torch.cat([tokens[:, :4], text[:, context:], text[:, context : context + 9]], 1)
    prompt = decoder(prompts, chunks, pool, AUX)
    for span in chunks.attn_mask.spans()[1:]:
        for (hidden, keys), row in zip(alone, range(span.start, span.stop), strict=False):
            assert torch.equal(prompt.hidden[0, row], hidden), row
            assert torch.equal(prompt.k[:, 0, row], keys), row


def one_by_one(decoder: Decoder, text: torch.Tensor, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and keys of the tokens past the context, each alone in its pass, in pages of another size."""
    pool, table = filled(decoder, text[:, :1], page_size=16)
    found = []
    for place in range(1, text.shape[1]):
        rows = Rows.chain(1, Where(table, torch.tensor([place])))
        out = decoder(text[:, place : place + 1], rows, pool, AUX)
        pool.write(out.k, out.v, (table,), rows.positions, torch.ones(1, 1, dtype=torch.bool))
        found.append((out.hidden[0, 0], out.k[:, 0, 0]))
    return found[context - 1 :]


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_what_is_in_front_of_a_window_is_never_read(garbage: float) -> None:
    """Pages before a window hold garbage, or have been freed: their numbers are 0, or beyond the pool."""
    native = packed(tiny_decoder("qwen3", head_dim=16, windows=(6, 3, 6)))
    pool, table = filled(native, random_tokens(native, 2, 33))
    context, (depth, mask) = torch.tensor([33, 21]), random_tree(2, 9)
    rows = Rows(context[:, None] + depth, mask, Where(table, context))
    chunks = Chunks.of([5, 3], Where(table, context), pool.page_size)
    tokens, prompts = random_tokens(native, 2, 9), random_tokens(native, 1, 8)
    expected = native(tokens, rows, pool, AUX), native(prompts, chunks, pool, AUX)
    for number in (0, 10**12):
        freed = table.clone()
        for request, length in enumerate(context.tolist()):
            kept = (length - 5) // pool.page_size  # the first page of the first row's window
            pool.k[:, table[request, :kept]] = pool.v[:, table[request, :kept]] = garbage
            freed[request, :kept] = number
        pool.k[:, 0] = pool.v[:, 0] = garbage
        found = (
            native(part, replace(given, where=Where(freed, given.where.context_len)), pool, AUX)
            for part, given in ((tokens, rows), (prompts, chunks))
        )
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.hidden, other.hidden)
    assert expected[0].hidden.isfinite().all()


def test_threads_and_neighbours_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = packed(tiny_decoder("llama", head_dim=16).bfloat16())
    tokens = random_tokens(decoder, 7, 19)
    alone = [decoder.full_pass(row[None], AUX) for row in tokens]
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        together = decoder.full_pass(tokens, AUX)
        for number, one in enumerate(alone):
            assert torch.equal(together.hidden[number], one.hidden[0])
            assert torch.equal(together.features[number], one.features[0])


def test_a_packed_drafter_drafts_the_same() -> None:
    target = tiny_decoder("qwen3", head_dim=16).config
    plain = tiny_drafter(target)
    native = copy.deepcopy(plain)
    pack(native)
    assert native.compiled is not None
    features, places = torch.randn(1, 9, plain.fc.in_features), torch.arange(9)[None]
    embedded = torch.randn(1, 4, target.body.hidden_size)
    table, length = torch.tensor([[1, 2, 3, 4]]), torch.tensor([9])
    mask = torch.ones(1, 4, 4, dtype=torch.bool)
    found = []
    for drafter in (plain, native):
        pool = KVPool(plain.config.body, PoolSizes(5, 4), torch.float32, "cpu")
        k, v = drafter.context_keys_values(features, places)
        pool.write(k, v, (table,), places, torch.ones(1, 9, dtype=torch.bool))
        found.append(
            (k, v, drafter.draft(embedded, Rows(length[:, None] + places[:, :4], mask, Where(table, length)), pool))
        )
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_keys_and_values_of_a_context(family: Family, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms of keys, without, and with biases: near PyTorch in fp32, and each row's bits its own."""
    plain = tiny_drafter(tiny_decoder(family, head_dim=16).config, layers=3).to(dtype)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.2)
    native = copy.deepcopy(plain)
    pack(native)
    features, places = torch.randn(2, 37, plain.fc.in_features, dtype=dtype), torch.arange(74).view(2, 37) + 5
    found = native.context_keys_values(features, places)
    for ours, theirs in zip(found, plain.float().context_keys_values(features.float(), places), strict=True):
        assert ours.dtype == dtype
        error = (ours.float() - theirs).abs().max() / theirs.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 0.02)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for row in (0, 36):
        alone = native.context_keys_values(features[1:, row : row + 1], places[1:, row : row + 1])
        assert all(torch.equal(one[:, 0, 0], all_rows[:, 1, row]) for one, all_rows in zip(alone, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_passes_of_one_model_in_several_threads_do_not_meet(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes share memory that grows: none may write into another's or free it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    native = packed(tiny_decoder("qwen3", hidden=256, heads=4, kv_heads=2, head_dim=64))
    tokens = random_tokens(native, 1, 8)
    pool, table = filled(native, tokens)
    context = torch.tensor([8])
    rows = [random_tokens(native, 1, count) for count in (40, 3, 56, 17, 24, 9, 48, 31)]

    def run(new: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = native(new, Rows.chain(new.shape[1], Where(table, context)), pool, AUX).hidden
        return hidden

    expected = [run(new) for new in rows]
    for _ in range(5):
        assert isinstance(native.compiled, NativeLayers)
        library.functions().d2sd_free(ctypes.byref(native.compiled._memory))  # so that it has to grow again
        with ThreadPoolExecutor(4) as pool_of_threads:
            found = list(pool_of_threads.map(run, rows * 4))
        assert all(torch.equal(one, other) for one, other in zip(found, expected * 4, strict=True))


def test_layers_without_the_kernels_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, however many models are loaded."""
    monkeypatch.setattr(library, "available", lambda: False)
    monkeypatch.setattr(library, "load", lambda: "no C compiler")
    native._say_why.cache_clear()
    for _ in range(2):
        pack(model := tiny_decoder())
        assert model.compiled is None
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("d2sd.modeling.native", "WARNING")
    assert warning.getMessage().endswith("slower: no C compiler")
