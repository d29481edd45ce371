"""Page tables are what a loop over page numbers makes of them, and a long context costs the host a copy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from d2sd.runtime.batch import Batch, pack_where
from d2sd.runtime.kv_cache import KVCacheManager
from d2sd.runtime.pages import page_row
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.scheduler import Scheduler
from d2sd.runtime.sequence import Sequence
from tests.runtime.helpers import STEADY
from tests.runtime.played_pools import BLOCK, add, check_tables

T = TypeVar("T")
PAGE, PAGES, LONG, REQUESTS = 4, 128, 2048, 32


@st.composite
def held(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Pages of a request, and those of layers with a window, zeros in front."""
    pages = draw(st.lists(st.integers(1, 2**40), max_size=9))
    freed = draw(st.integers(0, len(pages)))
    return pages, [0] * freed + draw(st.lists(st.integers(1, 99), max_size=len(pages) - freed))


@given(rows=st.lists(held(), min_size=1, max_size=6), padding=st.integers(0, 3), exact=st.booleans())
@STEADY
def test_any_rows(rows: list[tuple[list[int], list[int]]], padding: int, exact: bool) -> None:
    sequences = [Sequence(0, Request((1,)), [1]) for _ in rows]
    for one, (pages, windowed) in zip(sequences, rows, strict=True):
        one.pages, one.windowed_pages = page_row(pages), page_row(windowed)
    check_tables(sequences, len(rows) + padding, exact=exact)


def test_a_table_keeps_its_values() -> None:
    """A step that was packed is not changed by pages that are taken while it waits for the device, or runs."""
    one = Sequence(0, Request((1,)), [1], pages=page_row([5, 6, 7]))
    table = pack_where([one], 1, exact=True).pages
    one.pages[1] = 9
    one.pages.append(8)
    assert table.tolist() == [[5, 6, 7]]


def test_a_long_context_costs_the_host_a_copy() -> None:
    """To schedule and pack a step of 2,048 pages a request takes as long as one of 128, but for copying the numbers.

    The best of many turns counts, in time of this thread: the machine may do other work.
    """
    served = {pages: serving(pages) for pages in (PAGES, LONG)}
    packing, copying = dict.fromkeys(served, math.inf), dict.fromkeys(served, math.inf)
    for _ in range(30):
        for pages, scheduler in served.items():
            seconds, batch = timed(lambda: packed(scheduler))  # noqa: B023  # called at once
            assert batch.where.pages.shape == (REQUESTS, pages)
            packing[pages] = min(packing[pages], seconds)
            copying[pages] = min(copying[pages], timed(batch.where.pages.clone)[0])
    short, long = (packing[pages] - copying[pages] for pages in (PAGES, LONG))
    assert long < 1.5 * short


def serving(pages: int) -> Scheduler:
    """A scheduler of requests that decode, with so many pages each."""
    tokens = (pages - 2) * PAGE
    limits = Limits(REQUESTS, pages * PAGE, PAGE, REQUESTS * tokens)
    scheduler = Scheduler(limits, KVCacheManager(limits, BLOCK, 1 + REQUESTS * pages))
    everybody = [add(scheduler, number, [number] * tokens) for number in range(REQUESTS)]
    while any(one.pending for one in everybody):
        for one, count in scheduler.schedule().prefill:
            one.cached += count
    return scheduler


def packed(scheduler: Scheduler) -> Batch:
    assert scheduler.make_room_ahead()
    return Batch.pack(scheduler.schedule().decode, 64, "cuda")


def timed(function: Callable[[], T]) -> tuple[float, T]:
    begun = time.thread_time()
    result = function()
    return time.thread_time() - begun, result
