"""Malformed HTTP requests, from a seed: bodies of the wrong shape, type or encoding, wrong routes, and broken HTTP."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

#: Values that a parameter should not have, or that lie at the edge of what it may.
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**40, 0.0, -0.5, 1e308, float("nan"), float("inf"),
    "", "\x00", "1", "w5", "\ud800", "a" * 5000, [], [[]], {}, [None], [-1], [2**70], ["", 1], {"a": {}}, [{"role": 1}],
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
)  # fmt: skip
_FIELDS = (
    "messages", "prompt", "model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "n",
    "max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias",
    "bad_words", "logprobs", "top_logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "response_format", "structured_outputs", "tools", "tool_choice", "deadline",
    "return_token_ids", "user", "metadata", "cache_salt", "priority", "best_of", "suffix", "echo", "modalities",
)  # fmt: skip
_ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/gpt", "/v1/",
    "/v1/embeddings", "/../etc/passwd", "/%00", "/v1/chat/completions/", "/health", "//", "/metrics?x=1",
)  # fmt: skip
_METHODS = ("POST", "GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")


class Malformed(NamedTuple):
    """One request; `raw` are bytes for the socket, and not HTTP."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    raw: bool = False


def malformed(seed: int) -> Malformed:
    """The request of a seed. It may be one that the server can answer: a mutation need not be an error."""
    draw = random.Random(seed)
    kinds: list[Callable[[random.Random], Malformed]] = [_field, _field, _field, _field, _text, _nested, _route, _raw]
    return draw.choice(kinds)(draw)


def _valid(draw: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"max_tokens": 2, "stream": draw.random() < 0.3}
    if draw.random() < 0.5:
        return "/v1/completions", body | {"prompt": "w5 w7"}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": "w5 w7"}]}


def _post(path: str, body: bytes, kind: str = "application/json") -> Malformed:
    return Malformed("POST", path, {"content-type": kind}, body)


def _value(draw: random.Random) -> Any:
    """A copy: the next mutation may change it in its place."""
    return deepcopy(draw.choice(_VALUES))


def _field(draw: random.Random) -> Malformed:
    """A valid body with some fields replaced, removed or invented."""
    path, body = _valid(draw)
    for _ in range(draw.randint(1, 3)):
        match draw.randrange(5):
            case 0:
                body.pop(draw.choice(list(body)), None) if body else None
            case 1:
                body["".join(draw.choices(string.printable, k=draw.randint(0, 12)))] = _value(draw)
            case 2 if isinstance(messages := body.get("messages"), list) and messages and isinstance(messages[0], dict):
                messages[0][draw.choice(["role", "content", "name", "tool_calls", "x"])] = _value(draw)
            case _:
                body[draw.choice(_FIELDS)] = _value(draw)
    return _post(path, json.dumps(body).encode())


def _text(draw: random.Random) -> Malformed:
    """A valid body with bytes changed, cut off, or of another encoding."""
    path, body = _valid(draw)
    data = bytearray(json.dumps(body).encode())
    match draw.randrange(5):
        case 0:
            del data[draw.randrange(len(data)) :]
        case 1:
            for _ in range(draw.randint(1, 8)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        case 2:
            data = bytearray(json.dumps(body).encode("utf-16"))
        case 3:
            data = bytearray(draw.randbytes(draw.randint(0, 2000)))
        case 4:
            return _post(path, bytes(data), draw.choice(["", "text/plain", "multipart/form-data", "application/xml"]))
    return _post(path, bytes(data))


def _nested(draw: random.Random) -> Malformed:
    """A very deep or long value."""
    path, _ = _valid(draw)
    depth = draw.choice([100, 1000, 20_000])
    value = draw.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "9" * depth, "[" * depth])
    return _post(path, f'{{"{draw.choice(_FIELDS)}": {value}}}'.encode())


def _route(draw: random.Random) -> Malformed:
    """A route or method that does not exist, or headers that are not right."""
    headers = {
        draw.choice(["content-type", "authorization", "x-request-id", "accept-encoding", "expect", "traceparent"]):
        draw.choice(["", "x" * 4000, "application/json; charset=nope", "Bearer ", "\t", "100-continue"])
    }  # fmt: skip
    return Malformed(draw.choice(_METHODS), draw.choice(_ROUTES), headers, draw.randbytes(draw.choice([0, 10])))


def _raw(draw: random.Random) -> Malformed:
    """Bytes that are not HTTP, or a request whose length is not its body's."""
    body = b'{"prompt": "w5", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    data = draw.choice([
        draw.randbytes(draw.randint(1, 400)), b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50, b"G" * 20_000,
        head + b"content-length: -1\r\n\r\n" + body, head + b"content-length: 9999\r\n\r\n" + body,
        head + b"content-length: 3\r\n\r\n" + body, head + b"content-length: 1e3\r\n\r\n" + body,
        head + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
        head + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + body,
        head + b"transfer-encoding: chunked\r\n\r\nffffffff\r\n" + body, head + b"a: " + b"b" * 100_000 + b"\r\n\r\n",
    ])  # fmt: skip
    return Malformed("", "", {}, data, raw=True)
