"""Blocks of kernels in orders that a GPU could take: what they tell each other is right in all of them.

One behind the other, as where there is room for one; and by chance, some at a time, from one branch to the next and
some far more often than others, so that blocks come, wait and leave between any two additions of the others.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra triton is not installed")

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from d2sd.plugins.cascade_attention import ChunkMask, pack_mask_bits
from d2sd.plugins.cascade_attention.triton.kernel import _shares
from d2sd.plugins.cascade_attention.triton.launch import launch
from d2sd.plugins.pair_scores import conditioned
from tests.plugins.cascade_attention.cases import Attention
from tests.plugins.kernels import pairs
from tests.ptx.cases import call_of
from tests.ptx.orders import in_order
from tools.ptxsim.launch import executed_as_ptx

ORDERS = ("first", "last", *range(4))


@triton.jit  # type: ignore[untyped-decorator]
def shares_kernel(arrived, parts, shares, sums, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sets parts[n] = n in the n-th of SPLITS programs, the shares that it merges, and the sum of all parts, if any."""
    number = tl.program_id(0)
    tl.store(parts + number, number)
    tl.debug_barrier()
    taken = _shares(arrived, SPLITS)
    tl.store(shares + number, taken)
    if taken != 0:
        tl.store(sums + number, tl.sum(tl.load(parts + tl.arange(0, SPLITS)), 0))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("splits", [2, 4, 8, 16])
def test_each_share_is_taken_once(splits: int) -> None:
    """By those that came in time, by those that left, and by the last in their place; and the word is zero again."""
    idle = set()
    for order in (None, "first", "last", *range(60)):
        arrived, (parts, shares, sums) = torch.zeros(1, dtype=torch.int32), torch.zeros(3, splits, dtype=torch.int32)
        with in_order(order), executed_as_ptx(90):
            shares_kernel[(splits,)](arrived, parts, shares, sums, splits, num_warps=1)
        taken = [bit for one in shares.tolist() for bit in range(16) if one >> bit & 1]
        assert sorted(taken) == list(range(splits)), order
        assert sums.tolist() == [splits * (splits - 1) // 2 * bool(one) for one in shares.tolist()], order
        assert not arrived.any(), order
        idle.add(shares.tolist().count(0))
    assert {0, splits - 1} <= idle, "none left, and all but the last did"


def attend(case: Attention, arrived: Tensor, *, chunks: bool) -> Tensor:
    call = call_of(case)
    if not chunks:
        words = pack_mask_bits(call.attn_mask)
        return launch(call.q, call.k, call.v, call.context, words, splits=case.splits, arrived=lambda: arrived)
    lengths = (case.rows, 1)  # of the second all tiles but the first are padding
    q, k, v = (
        torch.cat([one[request, :length] for request, length in enumerate(lengths)])[None]
        for one in (call.q, call.k, call.v)
    )
    mask = ChunkMask(lengths, torch.tensor([0, case.rows, case.rows + 1]))
    return launch(q, k, v, call.context, mask, splits=case.splits, arrived=lambda: arrived)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("capability", [80, 90])
def test_parts_may_end_in_any_order(capability: int, chunks: bool) -> None:
    """Bit for bit, with counters that the launch before has left: two requests, one without context, whose first splits
    have no tiles; rows of padding in each tile.
    """
    case = Attention("bf16", 32, 9, 4, contexts=(150, 0))
    arrived, expected = torch.zeros(8, dtype=torch.int32), None
    for order in (None, *ORDERS):
        with in_order(order), executed_as_ptx(capability, limit=10_000_000):
            found = attend(case, arrived, chunks=chunks)
        assert not arrived.any(), order
        expected = found if expected is None else expected
        assert torch.equal(found, expected), order


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, *(pytest.param(one, marks=pytest.mark.full) for one in (80, 100, 120))])
def test_slots_may_be_scored_in_any_order(capability: int) -> None:
    """The last of a block's slots walks, whichever it is."""
    arrived = torch.zeros(6, dtype=torch.int32)
    call = pairs.given(torch.bfloat16, 5, 20, pairs.SLOT, 4)._replace(arrived=arrived)
    expected = conditioned.reference(*call)
    for order in ORDERS:
        with in_order(order), executed_as_ptx(capability, limit=10_000_000):
            found = conditioned.triton(*call)
        assert not arrived.any(), order
        pairs.assert_same(found, expected)
