"""Clients take turns, also at the compiling of grammars; work whose caller has left is not begun."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest

from d2sd.errors import D2SDError, RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.serve.errors import Busy, QueueFull
from d2sd.serve.openai.errors import describe
from d2sd.serve.openai.grammars import Grammars
from d2sd.serve.turns import Turns
from tests.d2sd.serve.http import until

pytestmark = pytest.mark.anyio
FORM = StructuredOutputsParams(regex="a")


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
    await until(lambda: work.begun)
    return task


async def test_one_with_much_work_delays_another_by_one_piece() -> None:
    turns, work = Turns("t"), Work()
    first = await blocked(turns, work)
    many = [asyncio.ensure_future(turns.run("a", work.do, f"a{n}")) for n in range(5)]
    await asyncio.sleep(0)
    other = [asyncio.ensure_future(turns.run("b", work.do, f"b{n}")) for n in range(2)]
    await asyncio.sleep(0)
    work.open.set()
    assert await asyncio.gather(first, *many, *other) == ["block", "a0", "a1", "a2", "a3", "a4", "b0", "b1"]
    assert await turns.run("c", work.do, "c") == "c"
    assert work.begun == ["block", "a0", "b0", "a1", "b1", "a2", "a3", "a4", "c"]


async def test_work_that_nobody_waits_for_is_not_begun_and_its_turn_is_not_lost() -> None:
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
    assert work.begun == ["block", "stays"]


@pytest.mark.parametrize(("options", "error"), [({"max_waiting": 0}, QueueFull), ({"patience": 0.01}, Busy)])
async def test_what_would_wait_too_long_is_refused(options: dict[str, Any], error: type[D2SDError]) -> None:
    turns, work = Turns("t", **options), Work()
    first = await blocked(turns, work)
    with pytest.raises(error) as raised:
        await turns.run("b", work.do, "b")
    assert describe(raised.value)[0] == (503 if error is Busy else 429)
    work.open.set()
    await first
    assert await turns.run("b", work.do, "b") == "b"


async def test_an_error_is_the_callers() -> None:
    turns = Turns("t")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await turns.run("a", divmod, 1, 0)


class Compiler:
    """Compiles until `open` or `stop` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.count, self.known, self.stopped, self.open = error, 0, False, False, Event()

    def knows(self, form: StructuredOutputsParams) -> bool:
        return self.known

    def compile(self, form: StructuredOutputsParams, where: str, stop: Event) -> None:
        self.count += 1
        while not self.open.wait(0.005):
            if stop.is_set():
                self.stopped = True
                raise D2SDError("stopped")
        self.known = True
        if self.error is not None:
            raise self.error


async def begun(compiler: Any, count: int) -> list[asyncio.Task[None]]:
    grammars = Grammars(compiler, Turns("g"))
    tasks = [asyncio.ensure_future(grammars.prepare(f"client {n}", FORM)) for n in range(count)]
    await until(lambda: compiler.count)
    return tasks


async def test_the_same_grammar_is_compiled_once() -> None:
    compiler: Any = Compiler()
    tasks = await begun(compiler, 4)
    tasks[0].cancel()  # it began the work, and others wait
    await asyncio.sleep(0.02)
    compiler.open.set()
    assert await asyncio.gather(*tasks[1:]) == [None] * 3
    assert (compiler.count, compiler.stopped) == (1, False)
    await Grammars(compiler, Turns("g")).prepare("b", FORM)
    assert compiler.count == 1


async def test_a_grammar_that_nobody_waits_for_is_stopped() -> None:
    compiler: Any = Compiler()
    for task in await begun(compiler, 3):
        task.cancel()
    await until(lambda: compiler.stopped)


async def test_a_refusal_is_left_to_each_request_and_what_is_missing_is_not() -> None:
    missing = D2SDError("not installed")
    for error, answer in ((RequestError("bad"), None), (missing, missing)):
        compiler: Any = Compiler(error)
        compiler.open.set()
        found = await asyncio.gather(*await begun(compiler, 2), return_exceptions=True)
        assert found == [answer, answer]
