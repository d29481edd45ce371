"""Errors of a request as Triton's error codes."""

from __future__ import annotations

import logging

from d2sd.errors import D2SDError, GenerationError, RequestError
from d2sd.serve.errors import DeadlineExceeded, EngineFailed, QueueFull, ShuttingDown

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
            return str(error), code
    logger.error("a request failed", exc_info=error)
    return "The model failed to process the request.", "INTERNAL"
