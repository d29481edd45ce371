"""Errors of the engine as a service; the HTTP server turns each into a status."""

from __future__ import annotations

from d2sd.errors import D2SDError


class QueueFull(D2SDError):
    """The queue has no room for the request: try again later."""

    #: Seconds after which a client may try again.
    retry_after = 1


class Busy(QueueFull):
    """Text or a grammar waited too long for its turn: try again later."""


class DeadlineExceeded(D2SDError):
    """The request did not finish within its deadline."""


class ShuttingDown(D2SDError):
    """The engine accepts no more requests, or ended this one, because it is shutting down."""


class EngineFailed(D2SDError):
    """The engine stopped on an internal error, and every request with it."""
