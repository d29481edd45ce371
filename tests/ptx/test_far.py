"""Offsets beyond 2^31 numbers, and 2^32: pools of which only the pages in use exist, where they would be in memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.plugins.cascade_attention import pack_mask_bits
from d2sd.plugins.cascade_attention.triton import exact
from d2sd.plugins.cascade_attention.triton.launch import launch
from d2sd.plugins.kv_pages import write_pages
from tests.plugins.batch_invariance import attended
from tests.plugins.cascade_attention.cases import Attention
from tests.plugins.kernels.calls import assert_within_budget, read_back
from tests.plugins.test_cascade_attention import Call, Shape, ancestors, causal, make
from tests.plugins.test_kv_pages import KEEP, POSITIONS, TABLE
from tests.ptx.cases import call_of
from tools.ptxsim.launch import executed_as_ptx
from tools.ptxsim.order import Fault

_NO_RESERVE = 0x4000  # MAP_NORESERVE: addresses alone


class Far:
    """Tensors whose storage is address space, and what of it exists."""

    def __init__(self) -> None:
        self.parts: dict[int, list[tuple[int, int]]] = {}

    def pool(self, shape: Sequence[int], dtype: torch.dtype, pages: Sequence[tuple[int, ...]]) -> Tensor:
        """Zeros, of which these pages exist: indices of the leading axes."""
        if not hasattr(mmap, "MAP_ANONYMOUS"):
            pytest.skip("address space without memory needs Linux")
        size = prod(shape) * dtype.itemsize
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        made = torch.frombuffer(room, dtype=torch.uint8).view(dtype).view(*shape)
        ranges = []
        for page in pages:
            part = made[page]
            first = (part.data_ptr() - made.data_ptr(), part.nbytes)
            ranges.append((first[0], sum(first)))
        self.parts[made.untyped_storage().data_ptr()] = sorted(ranges)
        return made

    def call(self, call: Call) -> Call:
        """The call with each page far from every other: the even ones beyond 2^31 numbers, the odd ones beyond 2^32."""
        context, numbers = call.context, call.context.k_pages[0].numel()
        owned = sorted(set(context.page_table.flatten().tolist()))
        places = {page: (2**31 << page % 2) // numbers + 3 * page for page in owned}
        spread = []
        for pages in (context.k_pages, context.v_pages):
            shape = max(places.values()) + 1, *pages.shape[1:]
            pool = self.pool(shape, pages.dtype, [(place,) for place in places.values()])
            for page, place in places.items():
                pool[place] = pages[page]
            spread.append(pool)
        table = context.page_table.clone()
        for page, place in places.items():
            table[context.page_table == page] = place
        return call.over(k_pages=spread[0], v_pages=spread[1], page_table=table)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "case"),
    [
        (90, Attention("bf16", 64, 8, contexts=(70, 5))),
        (80, Attention("bf16", 64, 5, 2, contexts=(100, 9), window=30, sinks=True)),
        (89, Attention("bf16", 64, 8, 2, fp8=True, contexts=(70, 5))),
    ],
    ids=["trees", "windows", "fp8"],
)
def test_attention_reads_far_pages(capability: int, case: Attention) -> None:
    call, far = call_of(case), Far()
    plain, moved = read_back(call) if case.fp8 else call, far.call(call)
    mask = moved.mask
    with executed_as_ptx(capability, sparse=far.parts):
        words = pack_mask_bits(mask.allowed)
        found = launch(
            moved.q, moved.k, moved.v, moved.context, words, splits=case.splits, first=mask.first, sinks=call.sinks
        )
    assert_within_budget(found, plain.run(), plain)


@pytest.mark.slow
@pytest.mark.parametrize("causal_chunk", [False, True])
def test_batch_invariant_attention_reads_far_pages(causal_chunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles of the context, and the last one, which rows of a tree share one by one."""
    monkeypatch.setattr(exact, "SPAN", 64)
    exact.attention_constants.cache_clear()
    shape = Shape(contexts=(75, 0), rows=5, kv_heads=1, group=4, size=64, page_size=16)
    call, far = make(shape, causal if causal_chunk else ancestors).to(torch.bfloat16), Far()
    moved = far.call(call)
    with executed_as_ptx(80, sparse=far.parts):
        found = attended(moved, causal_chunk=causal_chunk)
    assert_within_budget(found, call.run(), call)


def test_rows_are_written_to_far_pages_and_layers() -> None:
    """To pages beyond 2^31 numbers of a layer, and to a layer that begins there."""
    draw, far = torch.Generator().manual_seed(1), Far()
    k, v = (torch.randn(3, 2, 4, 3, 16, generator=draw).bfloat16() for _ in "kv")
    numbers = 4 * 3 * 16
    table = TABLE + (2**31 // numbers + 5) * (TABLE % 2)
    shape = 3, int(table.max()) + 1, 4, 3, 16
    exist = [(layer, page) for layer in range(3) for page in table.flatten().tolist()] + [(n, 0) for n in range(3)]
    expected, found = ([far.pool(shape, torch.bfloat16, exist) for _ in "kv"] for _ in range(2))
    assert expected[0].stride(0) > 2**31
    write_pages.reference(k, v, expected[0], expected[1], table, POSITIONS, KEEP)
    with executed_as_ptx(90, sparse=far.parts):
        write_pages.triton(k, v, found[0], found[1], table, POSITIONS, KEEP)
    for layer, page in exist:
        for ours, theirs in zip(found, expected, strict=True):
            assert page == 0 or torch.equal(ours[layer, page], theirs[layer, page])
    assert all(bool(pool[2, table[0]].any()) for pool in found)


def test_what_does_not_exist_is_a_fault() -> None:
    call, far = call_of(Attention("bf16", 64, 8, contexts=(70, 5))), Far()
    moved = far.call(call)
    wrong = moved.over(page_table=moved.context.page_table + 1)
    words = pack_mask_bits(moved.mask.allowed)
    with pytest.raises(Fault, match="far from every tensor"), executed_as_ptx(90, sparse=far.parts):
        launch(wrong.q, wrong.k, wrong.v, wrong.context, words, splits=1)
