"""AsyncLLM: the answers of LLM, one batch for all calls, and pages that are free when a call has ended in any way."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from d2sd import LLM, AsyncLLM, DeadlineExceeded, RequestError, SamplingParams
from tests.d2sd.serve.engines import idle
from tests.d2sd.serve.http import until

pytestmark = pytest.mark.anyio
LONG = SamplingParams(max_tokens=50, ignore_eos=True)
USER = {"role": "user", "content": "w5 w7"}


@asynccontextmanager
async def opened(bundle: Path, **options: Any) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM that has no page in use when it is closed."""
    async with AsyncLLM(bundle, **options) as llm:
        _, engine = llm._session.open()
        yield llm
        await until(lambda: idle(engine))


async def test_many_calls_at_once_share_the_batch_and_equal_serial_ones(tiny_bundle: Path) -> None:
    prompts = [f"w{3 + number} w9" for number in range(12)]
    params = [SamplingParams(temperature=number % 2, seed=number, max_tokens=4 + number % 5) for number in range(12)]
    with LLM(tiny_bundle, policy="off") as serial:
        expected = [serial.generate(*one)[0].token_ids for one in zip(prompts, params, strict=True)]
        answer, text = serial.chat([USER])[0].text, "".join(serial.stream([5, 7]))

    async with opened(tiny_bundle, policy="off", max_batch=8) as llm:
        found = await asyncio.gather(*(llm.generate(*one) for one in zip(prompts, params, strict=True)))
        assert [completion.token_ids for (completion,) in found] == expected
        assert llm.stats.steps == sum(completion.stats.steps for (completion,) in found)
        assert llm._session.open()[1].clock.steps < llm.stats.steps / 2
        assert (await llm.chat([USER]))[0].text == answer
        assert "".join([piece async for piece in llm.stream([5, 7])]) == text
        several = await llm.generate(prompts, params)  # one call
        assert [completion.token_ids for completion in several] == expected


async def test_a_cancelled_call_and_a_closed_stream_leave_the_batch(tiny_bundle: Path) -> None:
    async with opened(tiny_bundle) as llm:
        _, engine = llm._session.open()
        task = asyncio.ensure_future(llm.generate(["w5"] * 8, LONG))
        await until(lambda: engine.busy)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.busy
        async with aclosing(llm.stream("w5", LONG)) as pieces:
            assert await anext(pieces)
        assert not engine.busy
        assert 0 < llm.stats.tokens < 8 * 50
        async for _ in llm.stream("w5", LONG):
            break  # the generator is closed when it is collected


async def test_a_deadline(tiny_bundle: Path) -> None:
    async with opened(tiny_bundle) as llm:
        other = asyncio.ensure_future(llm.generate("w5", LONG))
        with pytest.raises(DeadlineExceeded):
            await llm.chat([[USER]] * 4, LONG, deadline=1e-6)
        with pytest.raises(DeadlineExceeded):
            [piece async for piece in llm.stream("w5", LONG, deadline=1e-6)]
        for wrong in (0, -1.0, float("nan"), "1", True):
            with pytest.raises(RequestError, match="deadline"):
                await llm.generate("w5", deadline=wrong)  # type: ignore[arg-type]
        assert len((await other)[0].token_ids) == 50


async def test_refusals_and_the_end(tiny_bundle: Path) -> None:
    llm = AsyncLLM(tiny_bundle)
    assert repr(llm) == f"AsyncLLM({str(tiny_bundle)!r}, policy='auto', device='cpu', backend='torch')"
    with pytest.raises(RequestError, match="one completion"):
        await anext(llm.stream("w5", SamplingParams(n=2)))
    with pytest.raises(RequestError, match="prompt"):
        await llm.generate(["w5", ""])
    assert await llm.generate([]) == []
    running = asyncio.ensure_future(llm.generate(["w5"] * 20, LONG))
    await until(lambda: llm._session.open()[1].busy)
    await llm.close()
    for call in (running, llm.generate("w5"), llm.chat([USER])):
        with pytest.raises(RequestError, match="The LLM is closed"):
            await call


def test_several_event_loops(tiny_bundle: Path) -> None:
    llm = AsyncLLM(tiny_bundle)
    texts = [asyncio.run(llm.generate("w5 w7"))[0].text for _ in range(2)]
    assert texts[0] == texts[1]
    asyncio.run(llm.close())


def test_a_stream_left_open_when_its_loop_ends_leaves_quietly(tiny_bundle: Path) -> None:
    """An event loop that ends closes all generators at once."""
    llm, complaints, left = AsyncLLM(tiny_bundle), list[Any](), list[Any]()

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        for prompt in ("w5 w7", [USER]):
            left.append(llm.stream(prompt, LONG))
            await anext(left[-1])

    asyncio.run(leave())
    left.clear()
    gc.collect()
    assert complaints == []
    _, engine = llm._session.open()
    assert not engine.busy
    asyncio.run(llm.close())
