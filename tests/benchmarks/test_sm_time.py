"""Cycles of machine code: what costs more takes longer, and copies in flight hide their latency."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from benchmarks.ahead_of_time import compile_kernel
from benchmarks.gpu.attention_time import CAPABILITY, Case, lines_of_context, trace
from benchmarks.gpu.sm_time import H100, Machine, cycles
from d2sd.plugins.cascade_attention.triton.kernel import cascade_attention_kernel
from tests.plugins.cascade_attention.cases import Attention


@cache
def cubin() -> bytes:
    found: bytes = compile_kernel(cascade_attention_kernel, Attention("bf16", 128, 1, 1).launch, CAPABILITY).cubin
    return found


def took(turns: int, machine: Machine = H100, blocks: int = 1) -> float:
    ends, busy = cycles([trace(cubin(), turns, 1, 0)] * blocks, machine, warps=1, far=lines_of_context())
    assert max(busy.values()) <= max(ends)
    return max(ends)


@pytest.mark.slow
@pytest.mark.full
def test_a_turn_costs_no_less_than_its_bytes() -> None:
    """64 tokens of K and V, 32 KB."""
    turn = (took(24) - took(8)) / 16
    assert turn >= 64 * 2 * 128 * 2 / H100.memory
    assert turn < 2 * 64 * 2 * 128 * 2 / H100.memory, "the latency of memory is hidden by the copies in flight"


@pytest.mark.slow
@pytest.mark.full
def test_a_latency_that_nothing_hides_costs_every_time() -> None:
    """Without turns, only what comes one after the other is left: queries, lengths, pages, the product of new rows."""
    assert took(0, replace(H100, from_cache=H100.from_cache + 100)) >= took(0) + 300


@pytest.mark.slow
@pytest.mark.full
def test_blocks_share_an_sm() -> None:
    assert took(8) < took(8, blocks=2) < 2.2 * took(8)


@pytest.mark.slow
@pytest.mark.full
def test_one_pass_of_a_tree_takes_longer_than_its_bytes() -> None:
    case = Case(1, 64)
    assert case.bytes() / 3.35e12 < case.seconds() < 8e-6
