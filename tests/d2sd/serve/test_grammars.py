"""Grammars are compiled apart from other work, once for all who wait, and for nobody else."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

from d2sd.errors import D2SDError, RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.serve.openai.grammars import Grammars
from d2sd.serve.turns import Turns

FORM = StructuredOutputsParams(regex="a")


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
    while not compiler.count:
        await asyncio.sleep(0.001)
    return tasks


def test_the_same_grammar_is_compiled_once() -> None:
    async def scenario() -> None:
        compiler: Any = Compiler()
        tasks = await begun(compiler, 4)
        tasks[0].cancel()  # it began the work, and others wait
        await asyncio.sleep(0.02)
        compiler.open.set()
        assert await asyncio.gather(*tasks[1:]) == [None] * 3
        assert (compiler.count, compiler.stopped) == (1, False)
        await Grammars(compiler, Turns("g")).prepare("b", FORM)
        assert compiler.count == 1

    asyncio.run(scenario())


def test_a_grammar_that_nobody_waits_for_is_stopped() -> None:
    async def scenario() -> None:
        compiler: Any = Compiler()
        for task in await begun(compiler, 3):
            task.cancel()
        for _ in range(1000):
            if compiler.stopped:
                break
            await asyncio.sleep(0.005)
        compiler.open.set()  # or its thread would go on for ever
        assert compiler.stopped

    asyncio.run(scenario())


def test_a_refusal_is_left_to_each_request_and_what_is_missing_is_not() -> None:
    async def scenario(error: Exception) -> Any:
        compiler: Any = Compiler(error)
        compiler.open.set()
        return await asyncio.gather(*await begun(compiler, 2), return_exceptions=True)

    assert asyncio.run(scenario(RequestError("bad"))) == [None, None]
    missing = D2SDError("not installed")
    assert asyncio.run(scenario(missing)) == [missing, missing]
