"""The engine behind Dynamo's unified backend: token ids in, token ids out.

Dynamo's worker calls the methods of `DynamoEngine`; discovery, tokenization, stop strings, signals and HTTP are
Dynamo's. Nothing here imports Dynamo: `sdk` holds the names of it that are used (see `run.py`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from d2sd.bundle.options import ServiceOptions
from d2sd.errors import CLIENT, D2SDError, RequestError
from d2sd.runtime.sequence import Output
from d2sd.serve.async_engine import AsyncEngine
from d2sd.serve.dynamo.events import KVReporter
from d2sd.serve.dynamo.requests import RequestReader, capacity, depends_on_prompt
from d2sd.serve.errors import EngineFailed, QueueFull, ShuttingDown
from d2sd.serve.openai.metrics import Metrics, RequestTimer
from d2sd.serve.stream import Stream, merge

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.engine import Engine

logger = logging.getLogger(__name__)

#: Seconds between two looks at the engine: K/V events, metrics and health.
_REPORT = 0.02
#: Seconds in which streams that the drain has ended reach the frontend.
_FLUSH = 5.0


class DynamoEngine:
    """One engine, as `dynamo.common.backend.LLMEngine` describes it."""

    def __init__(self, settings: WorkerSettings, load: Callable[[], tuple[Bundle, Engine]], sdk: Any) -> None:
        """`load` opens the bundle and makes the engine."""
        self._settings, self._load, self._sdk = settings, load, sdk
        self._service: AsyncEngine | None = None
        self._streams: dict[str, Stream] = {}  # by the id of the request's context
        self._watch: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, worker_id: int) -> Any:
        """Load the models; afterwards `generate` may be called."""
        self._bundle, engine = await asyncio.to_thread(self._load)
        limits, pages = engine.limits, engine.scheduler.kv_cache.page_count - 1
        context = capacity(limits.max_context, pages, limits.page_size, engine.runner.block_size)
        self._reader = RequestReader(self._bundle, context)
        self._metrics = Metrics(engine, self._settings.model)
        self._reporter = KVReporter(engine, self._sdk, self._settings.kv_events and limits.prefix_cache)
        self._service = AsyncEngine(engine, max_waiting=self._settings.max_waiting)
        await self._service.start()
        self._watch = asyncio.ensure_future(self._report(self._service))
        return self._sdk.EngineConfig(
            model=self._settings.model,
            served_model_name=self._settings.model,
            llm=self._sdk.LlmRegistration(
                context_length=context,
                kv_cache_block_size=limits.page_size,
                total_kv_blocks=pages,
                max_num_seqs=limits.max_batch,
                max_num_batched_tokens=limits.prefill_chunk,
            ),
        )

    async def cleanup(self) -> None:
        """Finish requests within the drain's deadline, hand the rest to other workers, stop. May be called twice."""
        if self._service is not None:
            await self._service.drain(self._settings.drain_timeout)
            end = time.monotonic() + _FLUSH
            while self._streams and time.monotonic() < end:
                await asyncio.sleep(0.01)
            if self._watch is not None:
                self._watch.cancel()  # first: a stopped engine looks like a failed one
            await self._service.stop()
            await asyncio.to_thread(self._service.engine.runner.close)
            self._service = None

    async def _report(self, service: AsyncEngine) -> None:
        """Publish what the engine did; when it has failed, end the process as SIGTERM does: its streams move."""
        while service.health is None:
            self._reporter.report()
            await asyncio.sleep(_REPORT)
        logger.error("the engine failed, the worker ends: %s", service.health)
        signal.raise_signal(signal.SIGTERM)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, message: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer to one request in chunks of the tokens of one step or more.

        When this worker dies, the frontend asks another one to go on from the prompt and the tokens it has got, as one
        prompt. The same noise belongs to the same positions, so the text is what it would have been; an answer that
        depends on the end of the prompt is sent whole, and then the other worker begins it anew.
        """
        assert self._service is not None
        errors, timer = self._sdk.exceptions, RequestTimer(self._metrics)
        stream, finish, held = None, "cancelled", list[Output]()
        try:
            request = await asyncio.to_thread(self._reader.read, message)
            (stream,) = self._service.submit([request])
            self._streams[context.id()] = stream
            async for output in stream:
                timer.output(output)
                finish = output.finish or finish
                held.append(output)
                if output.finish is not None or not depends_on_prompt(request):
                    yield self._chunk(merge(held))
                    held.clear()
        except RequestError as error:
            raise errors.InvalidArgument(error.told(CLIENT)) from None
        except QueueFull as error:
            raise errors.HttpError(429, error.told(CLIENT)) from None
        except (ShuttingDown, EngineFailed) as error:
            raise errors.EngineShutdown(error.told(CLIENT)) from None  # the frontend moves the stream to another worker
        except D2SDError as error:  # its own grammar, or a package that is not installed
            finish = "error"
            raise errors.Unknown(error.told(CLIENT)) from None
        finally:
            self._streams.pop(context.id(), None)
            if stream is not None:
                stream.close()
                timer.end(stream.sequence, finish)

    async def abort(self, context: Any) -> None:
        """The client has left, or the frontend has found a stop string: cancel the request before the next step."""
        if (stream := self._streams.pop(context.id(), None)) is not None:
            stream.close()
            stream.end()
            Stream.wake([stream])

    def _chunk(self, output: Output) -> dict[str, Any]:
        chunk: dict[str, Any] = {"token_ids": list(output.tokens), "index": 0}
        if output.logprobs:
            decode = self._bundle.tokenizer.decode
            chunk["log_probs"] = [entry.logprob for entry in output.logprobs]
            chunk["top_logprobs"] = [
                [
                    {"rank": rank, "token_id": token, "token": decode([token]), "logprob": logprob}
                    for rank, (token, logprob) in enumerate(entry.top, 1)
                ]
                for entry in output.logprobs
            ]
        if output.finish is not None:
            chunk["finish_reason"] = output.finish
        return chunk

    # -- what Dynamo asks for ------------------------------------------------------------------------------------------

    async def health_check_payload(self) -> dict[str, Any]:
        """The probe of an idle worker: one token of a real request."""
        token = self._bundle.tokenizer.bos_token_id
        payload: dict[str, Any] = self._sdk.build_health_check_payload(0 if token is None else token)
        return payload

    async def kv_event_sources(self) -> list[Any]:
        """One publisher of K/V events, where there is a prefix cache and they are wanted."""
        return self._reporter.sources()

    def component_metrics_dp_ranks(self) -> list[int]:
        """One rank: the worker is one engine."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Take the publisher of the load in K/V pages."""
        self._reporter.snapshots = publisher

    async def register_prometheus(self, metrics: Any) -> None:
        """Add the `d2sd_` metrics to the worker's /metrics."""
        labels = dict(metrics.auto_labels)

        def scrape() -> Any:
            self._metrics.refresh()
            return self._sdk.gather_with_labels(self._metrics.registry, labels, prefix_filters=["d2sd_"])

        metrics.register_prometheus_expfmt_callback(scrape)


class WorkerSettings(ServiceOptions):
    """Names and limits of one worker. The drain begins after Dynamo's grace period."""

    model: str  # the name in /v1/models
    namespace: str = "dynamo"
    discovery: str = "etcd"  # Dynamo's discovery backend: kubernetes, etcd or file
    kv_events: bool = True  # tell the router what is in the prefix cache
