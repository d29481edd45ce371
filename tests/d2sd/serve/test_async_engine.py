"""The engine as a service: streams equal the engine's answers, and one request's end never reaches another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from d2sd.bundle.load import Bundle
from d2sd.errors import GenerationError, RequestError
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request
from d2sd.runtime.sequence import Output, Sequence
from d2sd.serve import async_engine
from d2sd.serve.async_engine import AsyncEngine
from d2sd.serve.errors import DeadlineExceeded, EngineFailed, QueueFull, ShuttingDown
from d2sd.serve.stream import Stream
from tests.d2sd.serve.engines import Held, idle
from tests.d2sd.serve.http import until

pytestmark = pytest.mark.anyio
#: Greedy, and long enough to be in the middle for a while.
LONG = Request((5, 7), 40)


@asynccontextmanager
async def served(engine: Engine, **options: Any) -> AsyncIterator[AsyncEngine]:
    service = AsyncEngine(engine, **options)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
        if service.health == "The engine is not running.":  # not after a failure
            assert idle(engine)


async def answer(service: AsyncEngine, request: Request, **options: Any) -> tuple[list[int], str]:
    outputs = [output async for output in service.generate(request, **options)]
    assert outputs[-1].finish in ("stop", "length")
    return [t for output in outputs for t in output.tokens], "".join(output.text for output in outputs)


async def test_a_reader_that_leaves_cancels_its_request_before_the_next_step(engine: Engine) -> None:
    held = Held(engine)

    async with served(engine) as service:
        held.open.set()
        stream = service.generate(LONG)
        first = await anext(stream)
        held.open.clear()  # at most the step that has begun still runs
        await stream.aclose()
        before = held.steps
        held.open.set()
        await until(lambda: service.live == 0)
        assert first.sequence.finish == "cancelled"
        assert held.steps <= before + 1

        task = asyncio.ensure_future(answer(service, LONG))
        await until(lambda: engine.scheduler.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not engine.busy)


async def test_a_deadline_ends_its_request_alone(engine: Engine) -> None:
    held = Held(engine)

    async with served(engine) as service:
        other = asyncio.ensure_future(answer(service, LONG))
        late = asyncio.ensure_future(answer(service, LONG, deadline=0.02))
        await asyncio.sleep(0.05)
        held.open.set()
        with pytest.raises(DeadlineExceeded):
            await late
        assert len((await other)[0]) == 40
        with pytest.raises(RequestError, match="deadline"):
            await answer(service, LONG, deadline=0)


async def test_a_full_queue_refuses_and_recovers(engine: Engine) -> None:
    held = Held(engine)

    async with served(engine, max_waiting=1) as service:
        accepted = service.submit([LONG] * 3)  # two may run, one may wait
        with pytest.raises(QueueFull, match="at most 3"):
            service.submit([LONG])
        accepted[1].close()
        held.open.set()
        await until(lambda: service.live < 3)
        assert len([o async for o in service.generate(Request((5,), 2))]) > 0
        with pytest.raises(QueueFull):  # all or none
            service.submit([LONG] * 4)
        for stream in accepted:
            stream.close()


async def test_a_request_that_can_never_run_is_refused(engine: Engine) -> None:
    async with served(engine) as service:
        with pytest.raises(RequestError, match="maximum context length"):
            service.submit([LONG, Request((5,), 100)])
        assert service.live == 0


async def test_a_request_whose_text_fails_takes_no_other_with_it(engine: Engine) -> None:
    submit = engine.submit

    def failing(ids: list[int]) -> str:
        raise UnicodeError("cannot decode")

    def submit_poisoned(request: Request) -> Sequence:
        sequence = submit(request)
        if request.prompt == (9,):
            assert sequence.text is not None
            sequence.text._decode = failing
        return sequence

    engine.submit = submit_poisoned  # type: ignore[method-assign]

    async with served(engine) as service:
        good = asyncio.ensure_future(answer(service, LONG))
        (bad,) = service.submit([Request((9,), 40)])
        with pytest.raises(GenerationError, match="UnicodeError: cannot decode"):
            [output async for output in bad]
        assert bad.sequence is not None
        assert bad.sequence.finish == "error"
        assert len((await good)[0]) == 40
        assert service.health is None


async def test_a_failed_engine_ends_every_stream_and_says_why(engine: Engine) -> None:
    held = Held(engine)

    def fail() -> list[Output]:
        raise ValueError("out of registers")

    async with served(engine) as service:
        tasks = [asyncio.ensure_future(answer(service, LONG)) for _ in range(3)]
        await until(lambda: service.live == 3)
        held.step = fail
        held.open.set()
        for task in tasks:
            with pytest.raises(EngineFailed, match="out of registers"):
                await task
        assert service.health == "ValueError: out of registers"
        assert (service.live, service.accepting) == (0, False)
        with pytest.raises(EngineFailed):
            service.submit([LONG])
        await service.drain(1)
        with pytest.raises(EngineFailed, match="cannot be started"):
            await service.start()


async def test_draining_finishes_what_it_can_and_ends_the_rest(engine: Engine) -> None:
    held = Held(engine)
    held.open.set()

    async with served(engine) as service:
        short = asyncio.ensure_future(answer(service, LONG))
        await until(lambda: service.live)
        await service.drain(10)
        assert len((await short)[0]) == 40
        with pytest.raises(ShuttingDown):
            service.submit([LONG])
        await service.stop()
        await service.start()
        held.open.clear()
        long = asyncio.ensure_future(answer(service, LONG))
        await until(lambda: service.live)
        drained = asyncio.ensure_future(service.drain(0.05))
        await asyncio.sleep(0.1)
        assert not drained.done()
        held.open.set()
        await drained
        if not long.done() or long.exception() is not None:  # else its last step was the one that was held
            with pytest.raises(ShuttingDown):
                await long


async def test_a_step_that_never_ends_holds_neither_the_drain_nor_the_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "_LAST_STEP", 0.05)
    held = Held(engine)
    service = AsyncEngine(engine)
    await service.start()
    (stream,) = service.submit([LONG])
    await asyncio.wait_for(service.drain(0.01), 5)
    assert service.live == 0
    with pytest.raises(ShuttingDown):
        await anext(stream)
    await asyncio.wait_for(service.stop(), 5)
    held.open.set()  # a thread that comes back finds no reader, and ends
    await until(lambda: service.health == "The engine is not running.")
    assert not engine.busy


async def test_a_slow_reader_gets_merged_outputs(
    engine: Engine, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d2sd.serve.stream._UNMERGED", 4)
    request = Request((5, 7), 50)
    expected = engine.generate([request])[0].answer

    async with served(engine) as service:
        (stream,) = service.submit([request])
        await until(lambda: stream.ended)
        assert len(stream._pending) <= 5
        outputs = [output async for output in stream]
        assert len(outputs) == 1
        assert list(outputs[0].tokens) == expected
        assert outputs[0].finish == "length"
        assert outputs[0].text == bundle.tokenizer.decode(expected, skip_special_tokens=True)


async def test_a_reader_is_woken_for_the_first_output_and_then_for_an_interval(engine: Engine) -> None:
    sequence = engine.submit(LONG)

    stream = Stream(LONG, lambda stream: None, interval=3)
    assert [stream.push(Output(sequence, (1,), "a", None)) for _ in range(3)] == [True, False, True]
    assert (await anext(stream)).tokens == (1, 1, 1)
    assert [stream.push(Output(sequence, tokens, "", None)) for tokens in ((1,), (2, 3))] == [False, True]
    assert (await anext(stream)).tokens == (1, 2, 3)
    assert stream.push(Output(sequence, (4,), "", "length"))
    engine.cancel(sequence)


async def test_a_watched_request_sees_its_steps_and_may_fail_alone(engine: Engine) -> None:
    async with served(engine) as service:
        seen: list[int] = []
        (stream,) = service.submit([LONG], watch=lambda trace, output: seen.append(len(trace.tree.tokens[0])))
        assert sum([len(output.tokens) async for output in stream]) == 40
        assert len(seen) > 1
        assert stream.sequence is not None
        assert len(seen) == stream.sequence.stats.steps

        def fail(trace: object, output: object) -> None:
            raise KeyError("picture")

        (stream,) = service.submit([LONG], watch=fail, interval=100)
        with pytest.raises(GenerationError, match="picture"):
            [output async for output in stream]
        assert len((await answer(service, LONG))[0]) == 40
