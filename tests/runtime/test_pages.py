from __future__ import annotations

from d2sd.runtime.pages import PageAllocator


def test_every_page_but_0_is_handed_out_once() -> None:
    pages = PageAllocator(6)
    assert pages.free == 5
    taken = [pages.take(2), pages.take(3)]
    assert all(taken)
    assert sorted(p for part in taken for p in part or []) == [1, 2, 3, 4, 5]
    assert pages.free == 0


def test_too_many_takes_nothing() -> None:
    pages = PageAllocator(4)
    assert pages.take(4) is None
    assert pages.free == 3
    assert pages.take(0) == []


def test_what_comes_back_is_handed_out_again() -> None:
    pages = PageAllocator(5)
    first, second = pages.take(2), pages.take(2)
    assert first is not None
    assert second is not None
    pages.give_back(first)
    assert pages.free == 2
    again = pages.take(2)
    assert sorted(again or []) == sorted(first)
