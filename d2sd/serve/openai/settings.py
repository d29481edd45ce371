"""Settings of the HTTP server."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from d2sd.bundle.options import ServiceOptions
from d2sd.errors import D2SDError

#: The prefix of metrics that vLLM has too; others are behind `d2sd_` whatever it is.
MetricsPrefix = Literal["d2sd", "vllm"]
#: A key that an `Authorization` header can carry. An empty one would equal a missing one.
_KEY = re.compile(r"[!-~]+", re.ASCII)


class ServerSettings(ServiceOptions):
    """Limits and names of one server; all times are in seconds. Raises D2SDError for a key that cannot be one."""

    model: str  # the name in /v1/models; requests may leave it out
    api_keys: Annotated[tuple[str, ...], Field(repr=False)] = ()  # none: every client is accepted
    max_body: int = 4 << 20  # bytes
    max_choices: int = 128  # most answers of one HTTP request: prompts times n
    max_logprobs: int = 16_384  # most tokens, of prompts and answers, whose logprobs one HTTP request asks for
    priorities: bool = False  # whether clients may set the priority of their requests
    request_timeout: float | None = None  # deadline of a request that has none of its own
    hosts: tuple[str, ...] = ()  # names that clients may call the server by; none: any
    origins: tuple[str, ...] = ()  # web pages that may use the server (CORS); "*" is any
    metrics_prefix: MetricsPrefix = "d2sd"

    @field_validator("api_keys")
    @classmethod
    def _can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(_KEY.fullmatch, keys)):
            raise D2SDError(
                "An API key is empty or cannot be sent in a header.",
                where="api_keys",
                expected="ASCII characters without spaces",
            )
        return keys
