"""Clients that note when every token arrives, and the one of OpenAI's chat API."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import httpx


@dataclass(slots=True)
class Reply:
    """The answer to one request; times are seconds after it was sent."""

    status: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens) of every chunk that has tokens
    end: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # of faces that tell them
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None  # OpenAI's error object

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return sum(count for _, count in self.arrivals)

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.error is None and self.finish is not None


class Client(Protocol):
    """A client of a face of the engine; an asynchronous context."""

    async def ask(self, body: dict[str, Any]) -> Reply:
        """Send a request of OpenAI's chat API as a stream and read it to its end."""
        ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *error: Any) -> None: ...


class HttpClient(httpx.AsyncClient):
    """A client of OpenAI's chat API that keeps its connections."""

    #: In the body of every stream. `return_token_ids`, an extension of vLLM that d2sd has too, tells how many tokens a
    #: chunk has: with speculation it is one for every token that the step accepted.
    streamed: ClassVar[dict[str, Any]] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }

    def __init__(self, url: str, *, connections: int = 256, timeout: float = 600, address: str | None = None) -> None:
        """`address` is the one to connect from."""
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        transport = httpx.AsyncHTTPTransport(limits=limits, local_address=address)
        super().__init__(base_url=url, transport=transport, timeout=timeout)
        self.always: dict[str, Any] = {}  # in every body

    def error_of(self, body: bytes, status: int) -> dict[str, Any]:
        """The error object in a body; raises ValueError if it is not one."""
        return error_of(body)

    async def ask(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Reply:
        """Send a request as a stream and read it to its end."""
        reply, begun = Reply(), time.perf_counter()
        async with self.stream("POST", path, json=body | self.always | self.streamed) as response:
            reply.status = response.status_code
            if response.status_code != 200:
                reply.error = self.error_of(await response.aread(), response.status_code)
            else:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._read(reply, json.loads(line[6:]), time.perf_counter() - begun)
        reply.end = time.perf_counter() - begun
        return reply

    def _read(self, reply: Reply, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            reply.error = self.error_of(json.dumps(event).encode(), 200)
            return
        before = reply.usage.get("completion_tokens", 0)
        reply.usage = event.get("usage") or reply.usage
        for choice in event["choices"]:
            tokens = choice.get("token_ids") or []
            count = len(tokens) or reply.usage.get("completion_tokens", 0) - before
            if count:
                reply.arrivals.append((now, count))
                reply.token_ids += tokens
            reply.text += choice.get("delta", {}).get("content") or choice.get("text") or ""
            reply.finish = choice.get("finish_reason") or reply.finish


def error_of(body: bytes) -> dict[str, Any]:
    """OpenAI's error object in a body; raises ValueError if it is not one."""
    try:
        error = json.loads(body)["error"]
        if set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]:
            return dict(error)
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError(f"not an error body of OpenAI's API: {body[:200]!r}")
