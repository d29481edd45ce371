"""How the kernel is cut: what any choice must satisfy, whatever its numbers are."""

from __future__ import annotations

import pytest

from d2sd.plugins.cascade_attention.triton.tiles import (
    LEAST_SHARE,
    MOST_SPLITS,
    choose_splits,
    chunk_warps,
    padded,
    select_tile,
)

POWERS = [2**n for n in range(10)]


@pytest.mark.parametrize("size", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("packed_rows", [1, 16, 17, 64, 640])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_blocks_fit_the_kernel(size: int, itemsize: int, packed_rows: int, fp8: bool, bounded: bool) -> None:
    blocks = select_tile(packed_rows, size, itemsize, fp8=fp8, bounded=bounded)
    assert {blocks.rows, blocks.columns, blocks.new, blocks.warps, padded(size)} <= set(POWERS)
    assert min(blocks.rows, blocks.columns, blocks.new, padded(size)) >= 16, "a product's least size"
    assert 32 % blocks.new == 0, "a tile of new rows reads one mask word"
    assert size <= padded(size) < 2 * size


def test_chunks_over_fp8_pages_take_eight_warps_where_four_spill() -> None:
    def warps(size: int, capability: int, rows: int = 64, *, fp8: bool = True) -> int:
        return chunk_warps(select_tile(rows, size, 2, fp8=fp8), size, capability, fp8=fp8)

    assert [warps(128, capability) for capability in (80, 89, 90, 100, 120)] == [8, 8, 4, 4, 8]
    assert [warps(64, 89), warps(96, 89), warps(256, 89), warps(128, 89, 16), warps(128, 89, fp8=False)] == [
        4,
        8,
        4,
        4,
        4,
    ]


def test_few_rows_take_a_small_tile() -> None:
    assert [select_tile(rows, 128, 2, fp8=False).rows for rows in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 64]
    assert [select_tile(1000, 128, 2, fp8=fp8, bounded=True).rows for fp8 in (False, True)] == [64, 32]


@pytest.mark.parametrize(
    ("programs", "slots", "splits"),
    [
        pytest.param(8, 8192, 16, id="one request of 8 K/V heads, 132 processors: all but 4 of them get work"),
        pytest.param(8, 1024, 8, id="no share below 128 tokens"),
        pytest.param(32, 8192, 4, id="64 rows of four heads: four tiles a head already"),
        pytest.param(100, 8192, 1, id="nearly full: halves would not run together"),
        pytest.param(1000, 10**6, 1, id="the chip is full"),
        pytest.param(1, 0, 1, id="no context at all"),
    ],
)
def test_splits_fill_the_chip(programs: int, slots: int, splits: int) -> None:
    assert choose_splits(programs, slots, processors=132) == splits


def test_splits_stay_in_bounds() -> None:
    for programs in range(1, 200, 7):
        for slots in range(0, 5000, 130):
            splits = choose_splits(programs, slots, 132)
            assert splits in POWERS
            assert splits <= MOST_SPLITS
            assert splits == 1 or (splits * programs <= 132 and slots >= splits * LEAST_SHARE)
