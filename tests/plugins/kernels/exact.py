"""The batch-invariant kernels: against their specification and loops, and bit for bit alone and among others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from d2sd.plugins import layer_ops
from d2sd.plugins.cascade_attention.triton import exact, exact_kernel
from d2sd.plugins.layer_ops.triton import linear, products
from d2sd.plugins.shared.fp8 import to_pages
from tests.plugins.batch_invariance import Text, attended, check_broken_rows, check_rows_alone, looped_linear, numbers
from tests.plugins.kernels.calls import assert_within_budget, in_fp8, read_back
from tests.plugins.test_cascade_attention import (
    Call,
    Shape,
    ancestors,
    behind,
    branches,
    causal,
    everyone,
    make,
    oracle,
    steps,
)

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("short_splits")]
SMALL = Shape(contexts=(70, 0, 5), rows=7, kv_heads=1, group=3, size=16, page_size=16)


@pytest.fixture(autouse=True)
def products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by NumPy's BLAS, whose sums depend on a row's place in its tile on some processors."""

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return np.einsum("mk,kn->mn", a.astype(dtype), b.astype(dtype))

    monkeypatch.setattr(np, "matmul", matmul)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return layer_ops.linear.triton(x, weight, bias, None, x.dtype)


def sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Not rounded to 16 bits, which would hide most differences."""
    return layer_ops.linear.triton(x, weight, bias, None, torch.float32)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=SLOW), torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [pytest.param(False, marks=SLOW), True])
def test_product(bias: bool, dtype: torch.dtype) -> None:
    """Inputs and outputs that no tile divides."""
    x, weight = numbers(5, 150).to(dtype), numbers(37, 150, seed=1).to(dtype)
    added = numbers(37, seed=2).to(dtype) if bias else None
    found = product(x, weight, added)
    relative = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for expected in (layer_ops.linear.reference(x, weight, added, None, dtype), looped_linear(x, weight, added)):
        torch.testing.assert_close(found.float(), expected.float(), rtol=relative, atol=relative)
    assert product(x[None], weight, added).shape == (1, 5, 37)


@SLOW
def test_fp8_product() -> None:
    one, scales = torch.tensor(1.0), (torch.tensor(0.5), torch.tensor(0.25))
    x, weight, bias = to_pages(numbers(5, 150), one), to_pages(numbers(37, 150, seed=1), one), numbers(37).half()
    sums = layer_ops.linear.triton(x, weight, None, None, torch.float32)
    torch.testing.assert_close(sums, looped_linear(x.float(), weight.float(), None), rtol=1e-5, atol=1e-5)
    found = layer_ops.linear.triton(x, weight, bias, scales, torch.float16)
    expected = layer_ops.linear.reference(x, weight, bias, scales, torch.float16)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@SLOW
def test_a_row_of_a_product_is_the_same_alone_and_among_others() -> None:
    check_product(torch.float16)


@SLOW
def test_a_row_of_an_fp32_product_is_the_same_alone_and_among_others() -> None:
    check_product(torch.float32)


@pytest.mark.parametrize("mask", [causal, ancestors, branches, everyone])
def test_key_order(mask: Callable[..., Tensor]) -> None:
    attn_mask = torch.stack([mask(9, seed) for seed in range(3)])
    found = exact.key_order(attn_mask)
    for b, t in ((b, t) for b in range(3) for t in range(9)):
        columns = attn_mask[b, t].nonzero().flatten().tolist()
        assert found[b, t, 9] == len(columns)
        assert found[b, t, : len(columns)].tolist() == columns
        others = (attn_mask[b, u].nonzero().flatten().tolist() for u in range(9))
        assert found[b, t, 10] == max(u for u, their in enumerate(others) if their[: len(columns)] == columns)


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        pytest.param(mask, dtype, marks=[] if (mask, dtype) == (ancestors, torch.float16) else SLOW)
        for mask in (causal, ancestors, branches, everyone)
        for dtype in (torch.float32, torch.float16)
    ],
)
def test_attention(mask: Callable[..., Tensor], dtype: torch.dtype) -> None:
    check_call(make(SMALL, mask).to(dtype), causal_chunk=mask is causal)


def check_call(call: Call, *, causal_chunk: bool) -> None:
    found = attended(call)
    assert_within_budget(found, oracle(call), call)
    assert_within_budget(found, call.run(), call)
    if causal_chunk:
        assert torch.equal(attended(call, causal_chunk=True), found)


def test_a_broken_row_reaches_those_who_see_it() -> None:
    check_broken_rows(attended, torch.float16)


#: Of one token, shorter than a tile, ending in a split behind the first, and longer than all keys.
WINDOWS = [1, 3, 40, 90]


@pytest.mark.parametrize(
    ("mask", "window", "dtype"),
    [
        pytest.param(mask, window, dtype, marks=[] if (mask, window) in ((ancestors, 40), (causal, 3)) else SLOW)
        for mask in (causal, ancestors, branches, everyone)
        for window, dtype in zip(WINDOWS, (torch.float32, torch.float16) * 2, strict=True)
    ],
)
def test_windows_and_sinks(mask: Callable[..., Tensor], window: int, dtype: torch.dtype) -> None:
    call = make(replace(SMALL, contexts=(100, 5), rows=5), mask).to(dtype)
    check_call(behind(call, window, steps(mask, call), sinks=True), causal_chunk=mask is causal)


@SLOW
@pytest.mark.parametrize("sink", [-torch.inf, -1e30, 1e4])
def test_sinks_of_any_size(sink: float) -> None:
    call = make(SMALL, ancestors)
    found = attended(replace(call, sinks=torch.full((call.q.shape[2],), sink)))
    assert torch.equal(found, attended(call) if sink < 0 else torch.zeros_like(found))


def test_pages_in_front_of_a_window_may_not_exist() -> None:
    call = make(replace(SMALL, contexts=(100,), rows=3), ancestors)
    call = behind(call, 30, steps(ancestors, call))
    table = call.context.page_table.clone()
    table[0, : (100 - 29) // 16] = 10**9
    assert torch.equal(attended(call.over(page_table=table)), attended(call))


@SLOW
def test_attention_over_fp8_pages() -> None:
    call = in_fp8(make(SMALL, ancestors), torch.tensor(0.011), torch.tensor(0.007))
    for given in (call, behind(call, 40, steps(ancestors, call), sinks=True)):
        assert_within_budget(attended(given), oracle(read_back(given)), read_back(given))


@SLOW
def test_large_passes_run_in_parts() -> None:
    call = make(SMALL, ancestors)
    for call, causal_chunk in ((make(SMALL, ancestors), False), (make(SMALL, causal), True)):
        small = 3 * 2 * 3 * 16 * 4 * 5  # five rows
        for window in (None, 12):
            narrow = behind(call, window, steps(causal if causal_chunk else ancestors, call), sinks=True)
            found = attended(narrow, causal_chunk=causal_chunk, most_partial=small)
            assert torch.equal(found, attended(narrow, causal_chunk=causal_chunk))


def check_attention() -> None:
    """A tree and a chunk, over the end of a tile and of a split, against single rows in other pages and buckets."""
    cases = ((60, 3), True, torch.float32), ((30,), False, torch.float32), ((122,), True, torch.float16)
    for contexts, tree, dtype in cases:
        shape = Shape(contexts=contexts, rows=9, kv_heads=1, group=3, size=16, page_size=16)
        Text.of(shape, dtype, tree=tree).check([3, 8], spare=7)


def check_windows() -> None:
    """Windows of two rows, which end among those of a tree, of 20 keys and of 70, over a split; sinks."""
    cases = ((60, 3), True, 20), ((30,), False, 20), ((122,), True, 70), ((40,), True, 2), ((62,), False, 2)
    for contexts, tree, window in cases:
        shape = Shape(contexts=contexts, rows=9, kv_heads=1, group=3, size=16, page_size=16)
        Text.of(shape, torch.float32, tree=tree, window=window, sinks=True).check([3, 8], spare=7)


@SLOW
@pytest.mark.parametrize("check", [check_attention, check_windows])
def test_a_row_of_attention_is_the_same_in_a_tree_a_chunk_and_alone(check: Callable[[], None]) -> None:
    check()


def check_product(dtype: torch.dtype = torch.float16) -> None:
    x, weight, bias = numbers(70, 150), numbers(37, 150, seed=1), numbers(37, seed=2)
    check_rows_alone(sums, x.to(dtype), weight.to(dtype), bias.to(dtype), (1, 7, 16, 64))


#: Of which module, what is replaced by what: results stay right, their order comes to depend on the call.
MUTANTS: dict[str, tuple[ModuleType, str, str, Callable[[], None]]] = {
    "many rows start at another input": (
        linear,
        "        known = start",
        "        start = (start + tl.where(rows > 7, BLOCK_K, 0)) % (tl.cdiv(IN, BLOCK_K) * BLOCK_K)\n"
        "        known = start",
        check_product,
    ),
    "the place in a tile changes the order": (
        linear,
        "a, b = a.to(tl.float32), b.to(tl.float32)",
        "a, b = tl.where((row % 2 == 0)[:, None], a.to(tl.float32), a.to(tl.float32) * (1 + 2e-7)), b.to(tl.float32)",
        check_product,
    ),
    "a lone row's keys from the last to the first": (
        exact_kernel,
        "    lane_n = tl.arange(0, BLOCK_N)",
        "    lane_n = tl.arange(0, BLOCK_N)\n    lane_n = tl.where(rows > 1, lane_n, BLOCK_N - 1 - lane_n)",
        check_attention,
    ),
    "a row led by one that only begins like it": (
        exact_kernel,
        "(lead == leader)[:, None]",
        "(first + row <= leader)[:, None]",
        check_attention,
    ),
    "splits of as many positions as there are rows": (
        exact_kernel,
        "    begin = split * SPAN\n    end = begin + SPAN",
        "    share = SPAN - 32 * (rows > 1)\n    begin = split * share\n    end = begin + share",
        check_attention,
    ),
    "new keys of a row behind all of its context": (
        exact_kernel,
        "return count, front, tl.maximum(context, front)",
        "return count, front, context",
        check_windows,
    ),
    "tiles that begin with a window": (
        exact_kernel,
        "begin = tl.maximum(begin, least // BLOCK_N * BLOCK_N)",
        "begin = tl.maximum(begin, least)",
        check_windows,
    ),
    "a sink in the last split": (
        exact_kernel,
        "best, total = tl.where(split == 0, sink, best), tl.where(split == 0, 1.0, total)",
        "own = split == tl.num_programs(2) - 1\n"
        "        best, total = tl.where(own, sink, best), tl.where(own, 1.0, total)",
        check_windows,
    ),
}


@SLOW
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new, check = MUTANTS[name]
    text = Path(str(module.__file__)).read_text()
    assert text.count(old) == 1
    (tmp_path / f"mutant_{len(name)}.py").write_text(text.replace(old, new))
    monkeypatch.syspath_prepend(tmp_path)
    mutant: Any = __import__(f"mutant_{len(name)}")
    launcher, kernel = (products, "linear_kernel") if module is linear else (exact, "attention_kernel")
    monkeypatch.setattr(launcher, kernel, getattr(mutant, kernel))
    with pytest.raises(AssertionError):
        check()
