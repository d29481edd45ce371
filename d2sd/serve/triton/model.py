"""The model of Triton's Python backend: one process that owns the engine, in-flight batching included.

Triton's thread          event loop's thread                    engine's thread
execute  --------------> _serve: read, tokenize, submit ------> AsyncEngine
sender.send <----------- each output <------------------------- engine.step
canceller: is_cancelled -> cancels the task of _serve
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from d2sd.bundle.serving import make_engine, offer_choices
from d2sd.errors import D2SDError, RequestError
from d2sd.logs import log_to_stderr
from d2sd.serve.async_engine import AsyncEngine
from d2sd.serve.openai.generation import Generation
from d2sd.serve.openai.requests import RequestMaker
from d2sd.serve.triton.metrics import TritonMetrics
from d2sd.serve.triton.parameters import Parameters
from d2sd.serve.triton.process import end_with_parent
from d2sd.serve.triton.requests import Call, read_call
from d2sd.serve.triton.responses import Answer
from d2sd.serve.triton.sender import Sender

if TYPE_CHECKING:
    from d2sd.runtime.request import Request
    from d2sd.serve.openai.protocol import CompletionBody

#: Seconds between two looks at cancellations, each a message to the server, and between two publications of metrics.
_CANCELLED, _PUBLISH = 0.1, 0.5
#: Seconds after the drain in which the last responses are sent.
_FLUSH = 5


class TritonPythonModel:
    """Triton's interface: `initialize`, `execute` and `finalize`, called in one thread."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the bundle named in config.pbtxt, on the GPU of this instance or on the CPU."""
        self._watcher = end_with_parent()
        log_to_stderr(logging.Formatter("%(levelname)s %(name)s: %(message)s"), "d2sd")  # Triton passes it on
        config = json.loads(args["model_config"])
        gpu = args["model_instance_kind"] == "GPU"
        try:
            device = f"cuda:{args['model_instance_device_id']}" if gpu else "cpu"
            parameters = Parameters.read(config["parameters"], device)
            self._bundle = bundle = parameters.load(Path(parameters.bundle))
            engine = make_engine(bundle, parameters)
            offer_choices(bundle, engine)
        except D2SDError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._batched, self._drain_timeout = config["max_batch_size"] > 0, parameters.drain_timeout
        self._interval = parameters.stream_interval
        self._requests = RequestMaker(bundle, 1)
        self._metrics = TritonMetrics(engine, args["model_name"], args["model_instance_name"], pb_utils)
        self._engine = AsyncEngine(engine, max_waiting=parameters.max_waiting)
        self._tokenizer_thread = ThreadPoolExecutor(1, "d2sd-tokenizer")
        self._senders: dict[asyncio.Task[None], tuple[str, Sender]] = {}  # running requests: id and sender
        self._loop = asyncio.new_event_loop()
        self._threads = [
            Thread(target=target, name=f"d2sd-{name}", daemon=True)
            for name, target in (("responses", self._loop.run_forever), ("canceller", self._watch_cancellations))
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()
        self._wait(self._engine.start())
        self._publisher = asyncio.run_coroutine_threadsafe(self._publish(), self._loop)

    def execute(self, requests: list[Any]) -> None:
        """Take requests; their responses are sent later, from the event loop."""
        for request in requests:
            sender = Sender(request.get_response_sender(), pb_utils, batched=self._batched)
            try:
                tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                call = read_call(tensors, json.loads(request.parameters() or "{}"))
            except Exception as error:
                sender.fail(error)
                continue
            asyncio.run_coroutine_threadsafe(self._accept(str(request.request_id()), sender, call), self._loop)

    def finalize(self) -> None:
        """Drain: requests that run have `drain_timeout` seconds to end."""
        self._wait(self._engine.drain(self._drain_timeout))
        end = time.monotonic() + _FLUSH
        while self._senders and time.monotonic() < end:
            time.sleep(0.01)
        self._publisher.cancel()
        self._wait(self._engine.stop())
        self._engine.engine.runner.close()
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join(_FLUSH)
        self._tokenizer_thread.shutdown(wait=False)

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # -- the event loop's thread ---------------------------------------------------------------------------------------

    async def _accept(self, name: str, sender: Sender, call: Call) -> None:
        """Serve a request, or cancel the running requests of its id."""
        if call.body is not None:
            await self._serve(name, sender, call)
        elif not name:
            sender.fail(RequestError("To stop a request, send its id.", where="stop"))
        else:
            for task in [task for task, (other, _) in self._senders.items() if other == name]:
                task.cancel()
            sender.end()

    async def _serve(self, name: str, sender: Sender, call: Call) -> None:
        """Generate the answer to one request, streamed or whole; the last response has the final flag."""
        task, generation = asyncio.current_task(), None
        assert task is not None
        assert call.body is not None
        self._senders[task] = name, sender
        try:
            requests = await self._loop.run_in_executor(self._tokenizer_thread, self._make, call.body)
            generation = Generation(self._engine.submit(requests, interval=self._interval), self._metrics)
            answer = Answer(call, generation, self._engine.engine.limits)
            async for _, output in generation.outputs():
                if answer.add(output) and call.body.stream and output.finish is None:
                    sender.send(answer.response(final=False))
            sender.send(answer.response(final=True), final=True)
        except asyncio.CancelledError:
            sender.cancel()
        except Exception as error:
            sender.fail(error)
        finally:
            if generation is not None:
                generation.close()
            del self._senders[task]

    def _make(self, body: CompletionBody) -> list[Request]:
        """The engine's request. An empty prompt, such as Triton's zero_data, is replaced by the BOS token."""
        if body.prompt == "":
            tokenizer = self._bundle.tokenizer
            first = tokenizer.bos_token_id
            body.prompt = [tokenizer.eos_token_id if first is None else first]
        return self._requests.completion(body)

    async def _publish(self) -> None:
        while True:
            self._metrics.publish()
            await asyncio.sleep(_PUBLISH)

    # -- other threads -------------------------------------------------------------------------------------------------

    def _watch_cancellations(self) -> None:
        """Cancel the requests that their clients cancelled."""
        while not self._closed:
            for task, (_, sender) in list(self._senders.items()):
                if sender.cancelled:
                    self._loop.call_soon_threadsafe(task.cancel)
            time.sleep(_CANCELLED)
