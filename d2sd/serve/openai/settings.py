"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and names of one server; all times are in seconds."""

    model: str  # the name in /v1/models; requests may leave it out
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: every client is accepted
    max_body: int = 4 << 20  # bytes
    max_waiting: int = 256  # requests that wait in addition to those that run
    max_choices: int = 128  # most answers of one HTTP request: prompts times n
    request_timeout: float | None = None  # deadline of a request that has none of its own
    drain_timeout: float = 30.0  # wait for running requests at shutdown
