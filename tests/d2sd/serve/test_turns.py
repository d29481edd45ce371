"""Clients take turns; work whose caller has left is not begun; nothing waits for ever."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest

from d2sd.serve.errors import Busy
from d2sd.serve.turns import Turns


class Work:
    """Work that notes its name when it begins; that of `block` goes on until `open`."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open = Event()

    def block(self, name: str) -> str:
        self.begun.append(name)
        assert self.open.wait(10)
        return name

    def do(self, name: str) -> str:
        self.begun.append(name)
        return name


async def blocked(turns: Turns, work: Work) -> asyncio.Task[str]:
    """Occupy the thread."""
    task = asyncio.ensure_future(turns.run("first", work.block, "block"))
    while not work.begun:
        await asyncio.sleep(0.001)
    return task


def test_one_with_much_work_delays_another_by_one_piece() -> None:
    async def scenario() -> list[str]:
        turns, work = Turns("t"), Work()
        first = await blocked(turns, work)
        many = [asyncio.ensure_future(turns.run("a", work.do, f"a{n}")) for n in range(5)]
        await asyncio.sleep(0)
        other = [asyncio.ensure_future(turns.run("b", work.do, f"b{n}")) for n in range(2)]
        await asyncio.sleep(0)
        work.open.set()
        assert await asyncio.gather(first, *many, *other) == ["block", "a0", "a1", "a2", "a3", "a4", "b0", "b1"]
        assert await turns.run("c", work.do, "c") == "c"
        return work.begun

    assert asyncio.run(scenario()) == ["block", "a0", "b0", "a1", "b1", "a2", "a3", "a4", "c"]


def test_work_that_nobody_waits_for_is_not_begun_and_its_turn_is_not_lost() -> None:
    async def scenario() -> list[str]:
        turns, work = Turns("t"), Work()
        first = await blocked(turns, work)
        gone = [asyncio.ensure_future(turns.run("a", work.do, f"gone{n}")) for n in range(3)]
        stays = asyncio.ensure_future(turns.run("a", work.do, "stays"))
        await asyncio.sleep(0)
        gone[0].cancel()
        gone[1].cancel()
        await asyncio.sleep(0)
        first.cancel()  # it runs on, and holds the thread
        await asyncio.sleep(0.01)
        assert work.begun == ["block"]
        turns._waiting["a"][0].add_done_callback(lambda _: gone[2].cancel())  # as its turn comes
        work.open.set()
        assert await stays == "stays"
        assert not turns._waiting
        return work.begun

    assert asyncio.run(scenario()) == ["block", "stays"]


@pytest.mark.parametrize("options", [{"max_waiting": 0}, {"patience": 0.01}])
def test_what_would_wait_too_long_is_refused(options: dict[str, Any]) -> None:
    async def scenario() -> None:
        turns, work = Turns("t", **options), Work()
        first = await blocked(turns, work)
        with pytest.raises(Busy):
            await turns.run("b", work.do, "b")
        work.open.set()
        await first
        assert await turns.run("b", work.do, "b") == "b"

    asyncio.run(scenario())


def test_an_error_is_the_callers() -> None:
    async def scenario() -> None:
        turns = Turns("t")
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await turns.run("a", divmod, 1, 0)

    asyncio.run(scenario())
