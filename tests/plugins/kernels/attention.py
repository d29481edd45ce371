"""The fused kernel against the op's specification and against the nested loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from d2sd.plugins.cascade_attention import PagedContext
from d2sd.plugins.cascade_attention.triton import kernel, launch
from tests.plugins.batch_invariance import check_broken_rows
from tests.plugins.kernels.calls import assert_within_budget, fused, fused_chunks, in_fp8, read_back
from tests.plugins.test_cascade_attention import (
    Call,
    Mask,
    Shape,
    ancestors,
    behind,
    branches,
    causal,
    everyone,
    itself,
    make,
    oracle,
    steps,
)

#: The least head size of a product. Everything but head size is tested with it: the interpreter is slow.
SMALL = Shape(size=16, page_size=16)


def assert_right(call: Call, splits: int) -> None:
    found = fused(call, splits)
    assert found.dtype == call.q.dtype
    assert_within_budget(found, oracle(call), call)
    assert_within_budget(found, call.run(), call)


CASES = [
    (replace(SMALL, rows=1, group=1, contexts=(37, 0)), itself, 1, "one row, MHA, an empty context"),
    (replace(SMALL, rows=5, contexts=(70, 0, 16)), ancestors, 2, "GQA 3:1, a page full to the brim"),
    (
        replace(SMALL, rows=8, group=4, page_size=64, contexts=(64, 130)),
        everyone,
        4,
        "GQA 4:1, four splits, pages of 64",
    ),
    (
        replace(SMALL, rows=33, group=8, kv_heads=1, page_size=32, contexts=(40,)),
        ancestors,
        1,
        "GQA 8:1, a second mask word",
    ),
    (replace(SMALL, rows=64, group=1, kv_heads=1, contexts=(50, 7)), branches, 2, "two full mask words"),
    (replace(SMALL, rows=2, page_size=1, contexts=(3, 0), group=1), causal, 2, "pages of one token"),
    (replace(SMALL, rows=2, size=64, contexts=(33,)), causal, 2, "D = 64"),
    (replace(SMALL, rows=2, size=96, contexts=(33,)), causal, 2, "D = 96, padded to 128"),
    (replace(SMALL, rows=2, size=128, contexts=(33,)), causal, 2, "D = 128"),
    (replace(SMALL, rows=2, size=256, contexts=(33,)), causal, 2, "D = 256"),
]


REST = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize(
    ("shape", "mask", "splits", "dtype"),
    [  # every shape in one of the two
        pytest.param(*case, dtype, id=f"{name}-{dtype}", marks=REST if (place + turn) % 2 else [])
        for place, (*case, name) in enumerate(CASES)
        for turn, dtype in enumerate((torch.float32, torch.float16))
    ],
)
def test_equals_loops_and_specification(shape: Shape, mask: Mask, splits: int, dtype: torch.dtype) -> None:
    assert_right(make(shape, mask).to(dtype), splits)


def test_a_broken_row_reaches_those_who_see_it() -> None:
    check_broken_rows(lambda call: fused(call, 2), torch.float16)


@pytest.mark.parametrize(
    ("lengths", "contexts", "splits", "fp8"),
    [
        ((33, 1, 12), (37, 0, 16), 1, False),
        ((3, 18), (70, 33), 2, True),
        pytest.param((5, 160, 1), (0, 20, 3), 1, False, marks=pytest.mark.slow),
    ],
)
def test_chunks_of_prompts(lengths: tuple[int, ...], contexts: tuple[int, ...], splits: int, fp8: bool) -> None:
    """Short ones beside long ones: no row sees another request's, nor one behind it."""
    check_chunks(lengths, contexts, splits, fp8=fp8)


@pytest.mark.parametrize(("splits", "window"), [(1, None), pytest.param(4, 20, marks=pytest.mark.slow)])
def test_chunks_that_only_the_device_knows(splits: int, window: int | None) -> None:
    """Empty ones among them, as in a graph."""
    check_chunks((3, 0, 18, 0), (70, 33, 5, 0), splits, fp8=False, window=window, known=False)


def check_chunks(
    lengths: tuple[int, ...],
    contexts: tuple[int, ...],
    splits: int,
    *,
    fp8: bool,
    size: int = SMALL.size,
    window: int | None = None,
    sinks: bool = False,
    known: bool = True,
) -> None:
    shape = replace(SMALL, rows=max(lengths), contexts=contexts, kv_heads=1, size=size)
    call = make(shape).to(torch.float16)
    plain = call = behind(call, window, steps(causal, call), sinks=sinks)
    if fp8:
        call = in_fp8(call, torch.tensor(0.011), torch.tensor(0.007))
        plain = read_back(call)
    chunks = call.chunks(lengths)
    specified = plain.chunks(lengths)
    if not known:
        chunks, specified = (
            replace(one, mask=replace(one.mask, lengths=(sum(lengths),))) for one in (chunks, specified)
        )
    found = fused_chunks(chunks, splits)
    assert_within_budget(found[0], oracle(plain)[chunks.rows], plain)
    assert_within_budget(found, specified.run(), plain)
    assert known == chunks.mask.known


#: Window, splits, contexts, mask: windows of one token, of part of a page, of pages, of more than a tile of 32 or 64
#: tokens, and of more than all; some end among the rows, some splits have nothing left.
WINDOWS = [
    (1, 1, (37, 0), ancestors),
    (3, 2, (70, 1, 16), ancestors),
    (20, 1, (70, 5), causal),
    (40, 4, (130, 0), everyone),
    (90, 2, (150, 40), branches),
    (300, 2, (70, 0), ancestors),
]


@pytest.mark.parametrize(
    ("window", "splits", "contexts", "mask", "sinks", "dtype"),
    [
        pytest.param(*case, sinks, dtype, marks=[] if (place + turn) % 3 == 0 and place < 5 else REST)
        for place, case in enumerate(WINDOWS)
        for turn, (sinks, dtype) in enumerate([(True, torch.float16), (False, torch.float32), (True, torch.float32)])
    ],
)
def test_windows_and_sinks(
    window: int, splits: int, contexts: tuple[int, ...], mask: Mask, sinks: bool, dtype: torch.dtype
) -> None:
    """NaN in front of all windows, and pages there of nobody or of anybody."""
    call = make(replace(SMALL, rows=6, contexts=contexts, kv_heads=1), mask).to(dtype)
    assert_right(behind(call, window, steps(mask, call), sinks=sinks), splits)


@pytest.mark.parametrize("splits", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_sinks_without_windows(splits: int) -> None:
    assert_right(behind(make(replace(SMALL, contexts=(70, 0)), ancestors), None, torch.empty(0), sinks=True), splits)


@pytest.mark.parametrize("splits", [2, pytest.param(1, marks=REST)])
@pytest.mark.parametrize("sink", [-torch.inf, pytest.param(-1e30, marks=REST), 1e4])
def test_sinks_of_any_size(sink: float, splits: int) -> None:
    """One far below all scores is none, one far above takes all weight."""
    call = make(replace(SMALL, contexts=(40, 0), kv_heads=1), ancestors)
    found = fused(replace(call, sinks=torch.full((call.q.shape[2],), sink)), splits)
    assert torch.equal(found, fused(call, splits) if sink < 0 else torch.zeros_like(found))


@pytest.mark.parametrize(
    ("lengths", "contexts", "splits", "window", "fp8"),
    [
        ((33, 1, 12), (37, 0, 16), 1, 5, False),
        ((3, 18), (70, 33), 2, 40, True),
        pytest.param((5, 160, 1), (0, 20, 3), 1, 33, False, marks=pytest.mark.slow),
        pytest.param((5, 160, 1), (0, 200, 3), 4, 64, False, marks=REST),
        pytest.param((40,), (9,), 1, 1, True, marks=REST),
    ],
)
def test_chunks_behind_windows(
    lengths: tuple[int, ...], contexts: tuple[int, ...], splits: int, window: int, fp8: bool
) -> None:
    check_chunks(lengths, contexts, splits, fp8=fp8, window=window, sinks=True)


def test_pages_in_front_of_a_window_may_not_exist() -> None:
    """No tile reads their numbers, which would be out of bounds."""
    call = make(replace(SMALL, contexts=(100, 90), rows=3, kv_heads=1), ancestors)
    call = behind(call, 30, steps(ancestors, call))
    table = call.context.page_table.clone()
    table[0, : (100 - 29) // 16] = 10**9
    table[1, : (90 - 29) // 16] = -(10**9)
    assert torch.equal(fused(call.over(page_table=table), 2), fused(call, 2))


@pytest.mark.parametrize("size", [16, 128])
def test_bf16(size: int) -> None:
    assert_right(make(replace(SMALL, size=size, contexts=(40, 0)), ancestors).to(torch.bfloat16), 2)


def test_every_request_has_its_own_tree() -> None:
    assert_right(make(replace(SMALL, rows=7, contexts=(3, 3, 3)), ancestors, seed=4), 1)


def test_indices_of_32_bits() -> None:
    call = make(replace(SMALL, contexts=(37, 5)), ancestors)
    narrow = call.over(page_table=call.context.page_table.int(), context_len=call.context.context_len.int())
    assert torch.equal(fused(narrow, 2), fused(call, 2))


def test_large_scores_do_not_overflow() -> None:
    call = make(replace(SMALL, contexts=(20,)), everyone)
    call = replace(call, q=call.q * 1e3)
    torch.testing.assert_close(fused(call, 2).double(), oracle(call), rtol=0, atol=5e-3)


@pytest.mark.parametrize("splits", [1, 4])
def test_unused_slots_and_pages_are_never_read(splits: int) -> None:
    """NaN stands in all of them; spare columns name any page, also those of another request."""
    call = make(replace(SMALL, contexts=(21, 0), spare_pages=3), everyone)
    k_pages, v_pages, table = call.context.k_pages, call.context.v_pages, call.context.page_table
    clean = call.over(k_pages=k_pages.nan_to_num(0), v_pages=v_pages.nan_to_num(0))
    used = torch.arange(table.shape[1]) < (call.context.context_len[:, None] + 15) // 16
    anything = torch.randint(len(k_pages), table.shape, generator=torch.Generator().manual_seed(2))
    dirty = call.over(page_table=torch.where(used, table, anything))
    assert torch.equal(fused(dirty, splits), fused(clean, splits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_pages(dtype: torch.dtype) -> None:
    scales = torch.tensor(0.011), torch.tensor(0.007)  # ± 4.9 and ± 3.1: some values saturate
    call = in_fp8(make(replace(SMALL, contexts=(37, 0)), ancestors).to(dtype), *scales)
    plain = read_back(call)
    found = fused(call, 2)
    assert_within_budget(found, oracle(plain), plain)
    assert_within_budget(found, call.run(), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_fp8_number_reads_as_its_page_says(dtype: torch.dtype) -> None:
    """One token of context and no row in sight: the result is its value, all 254 numbers of E4M3 side by side."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = torch.where(numbers.float().isnan(), 0, numbers.float()).to(torch.float8_e4m3fn)
    pages = torch.zeros(2, 16, 1, 256, dtype=torch.float8_e4m3fn)
    pages.view(torch.uint8)[1, 0, 0] = numbers.view(torch.uint8)
    one, scale = torch.ones(1, 1, 1, 256, dtype=dtype), torch.tensor(0.013)
    table, length, nobody = torch.tensor([[1]]), torch.tensor([1]), torch.zeros(1, 1, 1, dtype=torch.bool)
    call = Call(one, one, one, PagedContext(pages, pages, table, length, scale * 3, scale), nobody)
    found = fused(call, 1).flatten()
    assert torch.equal(found, (numbers.double() * scale.double()).float().to(dtype))


@pytest.mark.parametrize("splits", [1, 2])
def test_a_quantized_result(splits: int) -> None:
    """One token of context again: E4M3 numbers times a power of two, and some that saturate."""
    numbers = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0)
    pages = torch.zeros(2, 16, 1, 256)
    pages[1, 0, 0] = torch.cat([numbers, -numbers]) / 4
    pages[1, 0, 0, -4:] = torch.tensor([1e4, -1e4, 113.0, 112.0])
    one, length, nobody = torch.ones(1, 1, 1, 256), torch.tensor([1]), torch.zeros(1, 1, 1, dtype=torch.bool)
    call = Call(one, one, one, PagedContext(pages, pages, torch.tensor([[1]]), length), nobody)
    found = fused(call, splits, torch.tensor(0.25))
    assert found.dtype == torch.float8_e4m3fn
    assert torch.equal(found.float().flatten(), (pages[1, 0, 0] * 4).clamp(-448, 448))


#: What is replaced by what: a bound or a sink that has no effect, at each place where it has one.
MUTANTS = {
    "the tile begins at the front": ("front = tl.minimum(least, context)", "front = context * 0"),
    "rows see all that their tile reads": ("(position + place)[None, :] - bound[:, None] >= 0", "bound[:, None] >= 0"),
    "rows of a chunk are not bounded": ("seen = seen & (column[None, :] >= (bound - context)[:, None])", "pass"),
    "a sink in each split": ("last = split == SPLITS - 1", "last = split >= 0"),
    "no sink": ("tl.where(last, sink, best), tl.where(last, 1.0, total)", "best, total"),
    "the sink of the first heads": ("sinks + head * GROUP + packed", "sinks + packed"),
}


def check_windows() -> None:
    for case in WINDOWS[1:4]:
        test_windows_and_sinks(*case, sinks=True, dtype=torch.float32)
    check_chunks((3, 18), (70, 33), 2, fp8=False, window=9, sinks=True)
    call = make(replace(SMALL, contexts=(70,)), ancestors)  # of several K/V heads
    assert_right(behind(call, 20, steps(ancestors, call), sinks=True), 2)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.interpreter
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MUTANTS[name]
    text = Path(str(kernel.__file__)).read_text()
    assert text.count(old) == 1
    (tmp_path / f"fused_mutant_{len(name)}.py").write_text(text.replace(old, new))
    monkeypatch.syspath_prepend(tmp_path)
    mutant = __import__(f"fused_mutant_{len(name)}")
    monkeypatch.setattr(launch, "cascade_attention_kernel", mutant.cascade_attention_kernel)
    with pytest.raises(AssertionError):
        check_windows()
