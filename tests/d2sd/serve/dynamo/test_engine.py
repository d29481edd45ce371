"""The Dynamo worker without Dynamo: answers, refusals, cancellation, drain, K/V events, and what moving costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from d2sd.bundle.load import Bundle
from d2sd.bundle.options import EngineOptions
from d2sd.bundle.serving import make_engine
from d2sd.cli.main import main
from d2sd.runtime.engine import Engine
from d2sd.runtime.sequence import Output
from d2sd.serve.async_engine import AsyncEngine
from d2sd.serve.dynamo.engine import DynamoEngine, WorkerSettings
from d2sd.serve.dynamo.requests import RequestReader
from tests.d2sd.serve.dynamo import fakes
from tests.d2sd.serve.engines import Held
from tests.d2sd.serve.http import until

pytestmark = pytest.mark.anyio
SETTINGS = WorkerSettings(model="tiny", max_waiting=1, drain_timeout=5)


def message(prompt: list[int], tokens: int = 20, *, logprobs: int | None = None, **sampling: Any) -> dict[str, Any]:
    """A request as the frontend sends it."""
    stops = {name: sampling.pop(name) for name in ("min_tokens", "ignore_eos", "stop_token_ids") if name in sampling}
    return {
        "token_ids": prompt,
        "stop_conditions": {"max_tokens": tokens, "stop_token_ids_hidden": [2], "max_thinking_tokens": None} | stops,
        "sampling_options": {"n": None, "temperature": 0.0, "guided_decoding": None} | sampling,
        "output_options": {"logprobs": logprobs, "prompt_logprobs": None},
    }


@asynccontextmanager
async def worker(bundle: Bundle, engine: Engine, **settings: Any) -> AsyncIterator[DynamoEngine]:
    made = DynamoEngine(SETTINGS.model_copy(update=settings), lambda: (bundle, engine), fakes.sdk())
    await made.start(1)
    try:
        yield made
    finally:
        await made.cleanup()
        assert not engine.busy


async def chunks(made: DynamoEngine, sent: dict[str, Any], name: str = "one") -> list[dict[str, Any]]:
    return [chunk async for chunk in made.generate(sent, fakes.Context(name))]


def tokens_of(found: list[dict[str, Any]]) -> list[int]:
    assert all(chunk["index"] == 0 for chunk in found)
    assert [chunk.get("finish_reason") for chunk in found[:-1]] == [None] * (len(found) - 1)
    return [token for chunk in found for token in chunk["token_ids"]]


def slow(engine: Engine) -> list[int]:
    """Steps of `engine` take a moment; returns a list with an entry for each."""
    step, steps = engine.step, list[int]()

    def stepped() -> list[Output]:
        time.sleep(0.01)
        steps.append(1)
        return step()

    engine.step = stepped  # type: ignore[method-assign]
    return steps


@pytest.mark.slow
async def test_answers_equal_the_engine_and_come_in_chunks(bundle: Bundle, engine: Engine) -> None:
    async with worker(bundle, engine) as made:
        sent = [message([3 + i, 9], 30, temperature=0.699999988079071 * (i % 2), seed=i, logprobs=1) for i in range(3)]
        found = await asyncio.gather(*(chunks(made, one, str(i)) for i, one in enumerate(sent)))
        reader = RequestReader(bundle, 64)
        alone = [make_engine(bundle, policy="off").generate([reader.read(one)])[0].answer for one in sent]
        assert [tokens_of(one) for one in found] == alone
        assert max(len(chunk["token_ids"]) for one in found for chunk in one) > 1


async def test_registration_tells_the_capacity(bundle: Bundle, engine: Engine) -> None:
    made = DynamoEngine(SETTINGS, lambda: (bundle, engine), fakes.sdk())
    await made.cleanup()  # never started: nothing to release
    config = await made.start(7)
    assert (config.model, config.served_model_name) == ("tiny", "tiny")
    limits = engine.limits
    assert vars(config.llm) == {
        "context_length": limits.max_context,
        "kv_cache_block_size": limits.page_size,
        "total_kv_blocks": engine.scheduler.kv_cache.page_count - 1,
        "max_num_seqs": limits.max_batch,
        "max_num_batched_tokens": limits.prefill_chunk,
    }
    assert await made.health_check_payload() == {"token_ids": [0], "stop_conditions": {"max_tokens": 1}}
    assert len(await chunks(made, await made.health_check_payload())) == 1
    await made.cleanup()
    await made.cleanup()


async def test_logprobs_are_those_of_the_answer(bundle: Bundle, engine: Engine) -> None:
    async with worker(bundle, engine) as made:
        sent = message([3, 9], 6)
        sent["output_options"]["logprobs"] = 2
        found = await chunks(made, sent)
        for chunk in found:
            assert len(chunk["log_probs"]) == len(chunk["top_logprobs"]) == len(chunk["token_ids"])
            for token, own, top in zip(chunk["token_ids"], chunk["log_probs"], chunk["top_logprobs"], strict=True):
                assert [entry["rank"] for entry in top] == [1, 2]
                assert (top[0]["token_id"], top[0]["token"]) == (token, f"w{token}")  # greedy
                assert top[0]["logprob"] == own >= top[1]["logprob"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": [3] * 60}, "maximum context length"),
        ({"prefill_result": {"disaggregated_params": {}}}, "disaggregated serving"),
        ({"multi_modal_data": {"image_url": []}}, "images"),
        ({"routing": {"lora_name": "a"}}, "lora_name"),
        ({"sampling_options": {"n": 2}}, "where: n"),
        ({"sampling_options": {"top_p": 0}}, "top_p"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {}}}}, "guided_decoding.structural_tag"),
    ],
)
async def test_a_refusal_is_an_invalid_argument(
    bundle: Bundle, engine: Engine, changes: dict[str, Any], named: str
) -> None:
    async with worker(bundle, engine) as made:
        with pytest.raises(fakes.InvalidArgument, match=named):
            await chunks(made, message([3, 9]) | changes)
        assert len(tokens_of(await chunks(made, message([3, 9], 5)))) == 5


async def test_a_full_queue_is_too_many_requests(bundle: Bundle, engine: Engine) -> None:
    slow(engine)

    async with worker(bundle, engine) as made:
        tasks = [asyncio.ensure_future(chunks(made, message([3, 9], 6), str(i))) for i in range(5)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [error for error in found if isinstance(error, fakes.HttpError)]
        assert [error.code for error in refused] == [429, 429]
        assert sum(isinstance(one, list) for one in found) == 3


@pytest.mark.parametrize("aborted", [True, False])
async def test_a_request_whose_client_left_is_cancelled(bundle: Bundle, engine: Engine, aborted: bool) -> None:
    steps = slow(engine)

    async with worker(bundle, engine) as made:
        stream = made.generate(message([3, 9], 60), fakes.Context())
        await anext(stream)
        if aborted:
            await made.abort(fakes.Context())
            await made.abort(fakes.Context())
        else:
            await stream.aclose()
        done = len(steps)
        await until(lambda: not engine.busy)
        assert len(steps) <= done + 1
        assert engine.scheduler.kv_cache.pages.used == 0


async def test_abort_ends_a_stream_that_waits_for_a_step(bundle: Bundle, engine: Engine) -> None:
    held = Held(engine)

    async with worker(bundle, engine) as made:
        waiting = asyncio.ensure_future(chunks(made, message([3, 9], 60)))
        await until(lambda: engine.scheduler.waiting)
        await made.abort(fakes.Context())
        assert await asyncio.wait_for(waiting, 5) == []
        held.open.set()


@pytest.mark.parametrize("deadline", [10.0, 0.03])
async def test_the_drain_finishes_what_it_can_and_moves_the_rest(
    bundle: Bundle, engine: Engine, deadline: float
) -> None:
    slow(engine)

    async with worker(bundle, engine, drain_timeout=deadline) as made:
        task = asyncio.ensure_future(chunks(made, message([3, 9], 60)))
        await until(lambda: engine.scheduler.running)
        await made.cleanup()
        assert task.done()  # the frontend has heard of it before the process ends
        if deadline > 1:
            assert len(tokens_of(task.result())) == 60
        else:
            with pytest.raises(fakes.EngineShutdown):
                task.result()


async def test_a_slow_reader_hears_of_the_end_before_the_process_ends(bundle: Bundle, engine: Engine) -> None:
    slow(engine)

    async with worker(bundle, engine, drain_timeout=0.01) as made:

        async def read() -> None:
            async for _ in made.generate(message([3, 9], 60), fakes.Context()):
                await asyncio.sleep(0.3)

        task = asyncio.ensure_future(read())
        await until(lambda: engine.scheduler.running)
        await made.cleanup()
        await asyncio.sleep(0)
        assert task.done()
        assert isinstance(task.exception(), fakes.EngineShutdown)


async def test_a_worker_that_is_slow_to_stop_ends_once(
    bundle: Bundle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    monkeypatch.setattr("signal.raise_signal", signals.append)
    monkeypatch.setattr("d2sd.serve.dynamo.engine._REPORT", 0.001)
    stop = AsyncEngine.stop

    async def slowly(service: AsyncEngine) -> None:
        await stop(service)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(AsyncEngine, "stop", slowly)

    async with worker(bundle, engine) as made:
        await chunks(made, message([5, 6], 3))
    assert signals == []


async def test_a_failed_engine_moves_its_streams_and_ends_the_worker(
    bundle: Bundle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    monkeypatch.setattr("signal.raise_signal", signals.append)

    def fail() -> list[Output]:
        raise ValueError("out of registers")

    engine.step = fail  # type: ignore[method-assign]

    made = DynamoEngine(SETTINGS, lambda: (bundle, engine), fakes.sdk())
    await made.start(1)
    with pytest.raises(fakes.EngineShutdown, match="out of registers"):
        await chunks(made, message([3, 9]))
    await until(lambda: signals)
    await made.cleanup()


async def moved(bundle: Bundle, engine: Engine, sent: dict[str, Any], kill_at: int) -> list[int]:
    """Return a client's tokens when a worker dies after `kill_at` chunks and another goes on, as Dynamo does it."""
    got: list[int] = []
    for kill in (kill_at, 1000):
        stops = sent["stop_conditions"]
        again = sent | {"token_ids": sent["token_ids"] + got}
        if stops["max_tokens"] is not None:
            again |= {"stop_conditions": stops | {"max_tokens": stops["max_tokens"] - len(got)}}
        async with worker(bundle, engine) as made:
            stream = made.generate(again, fakes.Context())
            async for chunk in stream:
                kill -= 1
                if kill < 0:
                    break  # this chunk is lost with the worker
                got += chunk["token_ids"]
                if "finish_reason" in chunk:
                    await stream.aclose()
                    return got
            await stream.aclose()
    raise AssertionError("no end")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.699999988079071, "top_p": 0.8999999761581421, "seed": 11},
        {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.5},
        {"temperature": 0.7, "seed": 5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1.5, "seed": 18, "min_tokens": 23},  # ends with its 24th token
        {"tokens": None, "temperature": 0.7, "seed": 8, "ignore_eos": True},
    ],
)
async def test_a_moved_stream_has_the_text_it_would_have_had(
    bundle: Bundle, engine: Engine, sampling: dict[str, Any]
) -> None:
    sent = message([3, 9, 4], **{"tokens": 30} | sampling)
    whole = await moved(bundle, engine, sent, 1000)
    assert len(whole) > 8
    for kill_at in (0, 3):
        assert await moved(bundle, engine, sent, kill_at) == whole


@pytest.mark.slow
async def test_kv_events_tell_the_router_what_is_cached(bundle: Bundle, engine: Engine) -> None:
    async with worker(bundle, engine) as made:
        publisher, cache = fakes.Publisher(), engine.scheduler.kv_cache.pages.cache
        made.attach_snapshot_publisher(publisher)
        (source,) = await made.kv_event_sources()
        source.on_ready(publisher)
        prompt = [5 + i % 50 for i in range(40)]
        await chunks(made, message(prompt, 4))
        await until(lambda: len(publisher.blocks) == 2)
        (first, (no_parent, head, _)), (_, (parent, tail, _)) = publisher.blocks.items()
        assert (no_parent, parent, [*head, *tail]) == (None, first, prompt[:32])
        await chunks(made, message(prompt, 4) | {"routing": {"cache_salt": "tenant"}})
        await until(lambda: [salt for *_, salt in publisher.blocks.values()] == [None, None, "tenant", "tenant"])
        for start in range(10):
            await chunks(made, message([(7 * start + 3 * i) % 60 for i in range(50)], 4))
        # Two requests that write the same pages: one of them enters the cache.
        both = message([5, 9], 40, ignore_eos=True, stop_token_ids=[])
        await asyncio.gather(chunks(made, both, "one"), chunks(made, both, "two"))
        await until(lambda: not made._reporter._events)
        assert publisher.removed
        assert len(publisher.blocks) == len(cache._page_of)
        await until(lambda: publisher.snapshots[-1].kv_used_blocks == 0)
        assert publisher.snapshots[-1].kv_total_blocks == engine.scheduler.kv_cache.page_count - 1


async def test_without_kv_events_nothing_is_recorded(bundle: Bundle, engine: Engine) -> None:
    async with worker(bundle, engine, kv_events=False) as made:
        assert await made.kv_event_sources() == []
        await chunks(made, message([5] * 40, 4))
        assert engine.scheduler.kv_cache.pages.cache.events is None


def test_options_of_the_command_reach_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[EngineOptions] = []
    monkeypatch.setattr("d2sd.cli.worker.require", lambda *needed: None)
    monkeypatch.setattr("d2sd.serve.dynamo.run.run_worker", lambda path, settings, options: given.append(options))
    for flags in ([], ["--no-prefix-cache", "--max-batch", "3"]):
        assert CliRunner().invoke(main, ["worker", str(tmp_path), "--dynamo", *flags]).exit_code == 0
    assert given == [EngineOptions(), EngineOptions(prefix_cache=False, max_batch=3)]
