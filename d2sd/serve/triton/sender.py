"""Sends the responses of one request, with errors as Triton's error codes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from threading import Lock
from typing import Any

from d2sd.errors import CLIENT, D2SDError, GenerationError, RequestError
from d2sd.serve.errors import DeadlineExceeded, EngineFailed, QueueFull, ShuttingDown


class Sender:
    """Triton's response sender, of which nothing is asked after the last response: Triton 24.10 crashes on that.

    Methods may be called from several threads. After the last response `send` does nothing.
    """

    def __init__(self, sender: Any, pb_utils: Any, *, batched: bool) -> None:
        """`pb_utils` is the module triton_python_backend_utils. `batched` adds a leading dimension of 1 to outputs."""
        self._sender, self._pb_utils, self._batched = sender, pb_utils, batched
        self._lock, self._ended = Lock(), False

    def send(self, arrays: Mapping[str, Any], *, final: bool = False) -> None:
        """Send outputs; `final` ends the request."""
        shaped = {name: array.reshape(1, -1) if self._batched else array for name, array in arrays.items()}
        tensors = [self._pb_utils.Tensor(name, array) for name, array in shaped.items()]
        self._send(self._pb_utils.InferenceResponse(output_tensors=tensors), final)

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self._end(*describe(error))

    def cancel(self) -> None:
        """End the request as cancelled."""
        self._end("The request was cancelled.", "CANCELLED")

    def end(self) -> None:
        """End the request without a further response."""
        self._send(None, True)

    @property
    def cancelled(self) -> bool:
        """Whether the client cancelled the request before its last response."""
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def _end(self, text: str, code: str) -> None:
        error = self._pb_utils.TritonError(text, getattr(self._pb_utils.TritonError, code))
        self._send(self._pb_utils.InferenceResponse(output_tensors=[], error=error), True)

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = final
            flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
            if response is None:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response, flags=flags)


logger = logging.getLogger(__name__)

#: Error class -> name of the code in pb_utils.TritonError; the first that fits.
_CODES: tuple[tuple[type[D2SDError], str], ...] = (
    (RequestError, "INVALID_ARG"),
    (QueueFull, "UNAVAILABLE"),
    (ShuttingDown, "UNAVAILABLE"),
    (EngineFailed, "UNAVAILABLE"),
    (DeadlineExceeded, "CANCELLED"),
    (GenerationError, "INTERNAL"),
    (D2SDError, "UNSUPPORTED"),  # such as a package that is not installed
)


def describe(error: Exception) -> tuple[str, str]:
    """Text and code for the client; an error that is not its own is logged and not shown."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return error.told(CLIENT), code
    logger.error("a request failed", exc_info=error)
    return "The model failed to process the request.", "INTERNAL"
