"""Triton Inference Server with d2sd's model in a process of its own, and a client of its decoupled gRPC streams."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.load.client import Reply
from benchmarks.load.server import Server, answers, spawn, wait_until
from benchmarks.load.tensors import tensors, triton_client
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.errors import D2SDError
from d2sd.manifest import load_manifest
from d2sd.serve.triton.repository import write_repository

if TYPE_CHECKING:
    from tritonclient.grpc import InferInput

#: What every request asks for besides its text.
_ASKED = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
#: What the errors say that are no refusal of the request itself.
_CODES = {
    "Too many requests": "queue_full",
    "shutting down": "shutting_down",
    "has no available versions": "shutting_down",
    "deadline": "deadline_exceeded",
    "failed to process": "internal_error",
}
#: Seconds in which the processes of a model notice that their server has ended.
_NOTICE = 10.0


class TritonServer(Server):
    """A Triton server; `url` is its gRPC address."""

    ports: tuple[int, int] = (0, 0)  # of HTTP and metrics

    @classmethod
    def start(cls, bundle: Path, log: Path, options: Sequence[str] = ()) -> TritonServer:
        """See `Server.start`; takes the options that are parameters of the model."""
        triton_client()
        repository = log.with_suffix(".repository")
        shutil.rmtree(repository, ignore_errors=True)
        names, given = options[::2], options[1::2]
        values = [f"{name[2:].replace('-', '_')}={value}" for name, value in zip(names, given, strict=True)]
        model = write_repository(repository, bundle, values=values).name
        ports = dict(zip(("grpc", "http", "metrics"), free_ports(3), strict=True))
        command = [sys.executable, "-m", "d2sd.serve.triton.run", str(repository), "--exit-timeout-secs=60"]
        for name, port in ports.items():
            command += [f"--{name}-port={port}", f"--{name}-address=127.0.0.1"]
        process = spawn(command, log)
        ready = f"http://127.0.0.1:{ports['http']}/v2/models/{model}/ready"
        url = wait_until(lambda: f"127.0.0.1:{ports['grpc']}" if answers(ready) else None, [process], log)
        server = cls(url, bundle, process, log)
        server.ports = ports["http"], ports["metrics"]
        return server

    def connect(self, *, connections: int = 256) -> TritonClient:
        assert self.bundle is not None
        return TritonClient(self.url, self.bundle)

    @property
    def model(self) -> str:
        assert self.bundle is not None
        return load_manifest(self.bundle).recipe.name

    @property
    def generate_url(self) -> str:
        """Where HTTP clients get an answer in one piece."""
        return f"http://127.0.0.1:{self.ports[0]}/v2/models/{self.model}/generate"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.ports[1]}/metrics"

    def stop(self, timeout: float = 60) -> int | None:
        """End the server; raises D2SDError if a process of its models outlives it."""
        below = self.processes()[1:]
        code = super().stop(timeout)
        last = time.monotonic() + _NOTICE
        while left := [pid for pid in below if Path(f"/proc/{pid}").exists()]:
            if time.monotonic() > last:
                raise D2SDError("Processes of the models outlived the server.", where=self.log, found=left)
            time.sleep(0.1)
        return code


class TritonClient:
    """Sends each request over a gRPC stream of its own."""

    def __init__(self, url: str, bundle: Path) -> None:
        manifest = load_manifest(bundle)
        self.model, self._page = manifest.recipe.name, manifest.recipe.limits.page_size
        self._tokenizer, self._template = load_tokenizer(bundle / "target"), manifest.recipe.target.template
        self._connection = triton_client().aio.InferenceServerClient(url)

    async def __aenter__(self) -> TritonClient:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._connection.close()

    def inputs(self, body: Mapping[str, Any], *, stream: bool = True) -> dict[str, Any]:
        """The values of the model's inputs for a request of OpenAI's chat API."""
        prompt = self._tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, tokenize=False, **self._template
        )
        parameters = json.dumps({key: value for key, value in body.items() if key != "messages"})
        return {"text_input": prompt, "stream": stream, "sampling_parameters": parameters}

    async def ask(self, body: dict[str, Any]) -> Reply:
        """See `Client.ask`. Triton tells the number of tokens in a chunk, but not their ids."""
        asked = dict.fromkeys((*_ASKED, "sampling_param_return_perf_metrics"), True)
        return await self.send(tensors(self.inputs(body) | asked))

    async def send(
        self, inputs: Sequence[InferInput], *, model: str | None = None, request_id: str = "", leave: int | None = None
    ) -> Reply:
        """Send a request and read its stream to the end, or cancel it after `leave` chunks."""

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": model or self.model, "inputs": inputs, "request_id": request_id}

        reply, begun = Reply(200), time.perf_counter()
        responses = self._connection.stream_infer(requests())
        async for result, error in responses:
            if error is not None:
                reply.error = {"message": error.message(), "code": triton_code(error.message())}
            else:
                self._read(reply, result, time.perf_counter() - begun)
            if leave is not None and len(reply.arrivals) >= leave:
                responses.cancel()
                break
        reply.end = time.perf_counter() - begun
        return reply

    def _read(self, reply: Reply, result: Any, now: float) -> None:
        found = {one.name: result.as_numpy(one.name).reshape(-1)[0] for one in result.get_response().outputs}
        if count := int(found.get("num_output_tokens", 0)):
            reply.arrivals.append((now, count))
        reply.text += found.get("text_output", b"").decode()
        if "finish_reason" in found:
            reply.finish = found["finish_reason"].decode()
            names = ("num_input_tokens", "total_accepted_draft_tokens", "kv_cache_reused_block")
            prompt, accepted, blocks = (int(found.get(name, 0)) for name in names)
            reply.usage = {
                "prompt_tokens": prompt,
                "completion_tokens_details": {"accepted_prediction_tokens": accepted},
                "prompt_tokens_details": {"cached_tokens": blocks * self._page},
            }


def triton_code(message: str) -> str:
    """A code for an error in a stream, which has a text only. (With the header `triton_grpc_error` it would have a
    code, but Triton 24.10 crashes on streams with that header.)
    """
    return next((code for text, code in _CODES.items() if text in message), "other")


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
