"""A streaming client of OpenAI's chat API that notes when every token arrives."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class Reply:
    """What came back for one request; times are seconds after it was sent."""

    status: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens) of every chunk that has tokens
    end: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None  # OpenAI's error object

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.error is None and self.finish is not None


def connect(url: str, *, connections: int = 256, timeout: float = 600) -> httpx.AsyncClient:
    """A client that keeps its connections."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/chat/completions") -> Reply:
    """Send a request as a stream and read it to its end.

    `return_token_ids`, an extension of vLLM that d2sd has too, tells how many tokens a chunk has: with speculation
    it is one for every token that the step accepted.
    """
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    reply, begun = Reply(), time.perf_counter()
    async with client.stream("POST", path, json=body | streamed) as response:
        reply.status = response.status_code
        if response.status_code != 200:
            reply.error = error_of(await response.aread())
        else:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _read(reply, json.loads(line[6:]), time.perf_counter() - begun)
    reply.end = time.perf_counter() - begun
    return reply


def error_of(body: bytes) -> dict[str, Any]:
    """OpenAI's error object in a body; raises ValueError if it is not one."""
    try:
        error = json.loads(body)["error"]
        if set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]:
            return dict(error)
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError(f"not an error body of OpenAI's API: {body[:200]!r}")


def _read(reply: Reply, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        reply.error = error_of(json.dumps(event).encode())
        return
    reply.usage = event.get("usage") or reply.usage
    for choice in event["choices"]:
        tokens = choice.get("token_ids") or []
        if tokens:
            reply.arrivals.append((now, len(tokens)))
            reply.token_ids += tokens
        reply.text += choice.get("delta", {}).get("content") or choice.get("text") or ""
        reply.finish = choice.get("finish_reason") or reply.finish
