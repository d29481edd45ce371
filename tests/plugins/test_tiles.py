"""How the kernel is cut: what any choice must satisfy, whatever its numbers are."""

from __future__ import annotations

import pytest

from d2sd.plugins.cascade_attention.triton.tiles import (
    LEAST_SHARE,
    MOST_SPLITS,
    MOST_TALL_SPLITS,
    choose_splits,
    most_shared,
    padded,
    resident,
    select_tile,
)

POWERS = [2**n for n in range(10)]
ARCHITECTURES = (0, 80, 86, 89, 90, 100, 120)


@pytest.mark.parametrize("size", [16, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("packed_rows", [1, 16, 17, 64, 640])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_blocks_fit_the_kernel(size: int, itemsize: int, packed_rows: int, fp8: bool, bounded: bool) -> None:
    for capability in ARCHITECTURES:
        tile = select_tile(packed_rows, size, itemsize, capability, fp8=fp8, bounded=bounded)
        assert {tile.rows, tile.columns, tile.warps, padded(size)} <= set(POWERS)
        assert min(tile.rows, tile.columns, padded(size)) >= 16, "a product's least size"
        assert tile.columns <= 64, "a tile of new rows reads two mask words"
        assert tile.stages >= 3, "with two a tile is waited for before the next is asked for"
    assert size <= padded(size) < 2 * size


def test_few_rows_take_a_small_tile() -> None:
    def heights(capability: int, splits: int = 1) -> list[int]:
        rows = (1, 16, 17, 32, 33, 64, 65, 1000)
        return [select_tile(packed, 128, 2, capability, fp8=False, splits=splits).rows for packed in rows]

    assert heights(80) == heights(120) == [16, 16, 32, 32, 64, 64, 64, 64]
    assert heights(90) == heights(100) == [16, 16, 32, 32, 64, 64, 128, 128]
    assert heights(90, MOST_TALL_SPLITS + 1) == heights(80), "twice the programs are done sooner"


def test_more_shared_memory_holds_more_columns_and_blocks() -> None:
    def held(capability: int, rows: int = 64) -> tuple[int, int]:
        tile = select_tile(rows, 128, 2, capability, fp8=False, splits=4)
        return tile.columns, resident(tile, 128, 2, capability, fp8=False)

    assert [held(capability) for capability in (80, 89, 90, 100, 120)] == [(32, 2), (32, 1), (64, 2), (64, 2), (32, 1)]
    assert most_shared(86) < most_shared(80) < most_shared(90)


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
    assert choose_splits(programs, slots, places=132) == splits


def test_splits_stay_in_bounds() -> None:
    for programs in range(1, 200, 7):
        for slots in range(0, 5000, 130):
            splits = choose_splits(programs, slots, 132)
            assert splits in POWERS
            assert splits <= MOST_SPLITS
            assert splits == 1 or (splits * programs <= 132 and slots >= splits * LEAST_SHARE)
