"""Decoupled gRPC streams."""

from __future__ import annotations

import queue
from typing import Any

import tritonclient.grpc as grpc

from benchmarks.load.tensors import tensors


class Streams:
    """Requests over one gRPC stream; responses arrive by request id."""

    def __init__(self, port: int, model: str = "tiny") -> None:
        self.client, self.model = grpc.InferenceServerClient(f"127.0.0.1:{port}"), model
        self._results: dict[str, queue.Queue[Any]] = {}
        self._lost: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(self._take)

    def _take(self, result: Any, error: Any) -> None:
        if error is not None:
            for waiting in self._results.values():  # an error has no id
                waiting.put(error)
        else:
            self._results[result.get_response().id].put(result)

    def open(self, name: str, shape: tuple[int, ...] = (-1,), **inputs: Any) -> None:
        self._results[name] = queue.Queue()
        self.client.async_stream_infer(
            self.model, tensors(inputs, shape), request_id=name, enable_empty_final_response=True
        )

    def next(self, name: str, timeout: float = 60) -> tuple[dict[str, Any], bool]:
        """Outputs of the next response, and whether it was the last one."""
        result = self._results[name].get(timeout=timeout)
        if isinstance(result, Exception):
            raise result
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name).reshape(-1).tolist() for output in response.outputs}
        return outputs, response.parameters["triton_final_response"].bool_param

    def text(self, name: str) -> str:
        """The whole text of a request."""
        text, final = b"", False
        while not final:
            outputs, final = self.next(name)
            text += b"".join(outputs.get("text_output", []))
        return text.decode()

    def close(self, *, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()
