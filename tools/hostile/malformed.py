"""Malformed requests: bodies of the wrong shape, type, depth or encoding, and wrong routes, methods and headers."""

from __future__ import annotations

import json
import random
import string
from copy import deepcopy
from typing import Any
from urllib.parse import quote

from tools.hostile.case import CHAT, COMPLETIONS, Case, Kind, Scene, letters, size

_FIELDS = (
    *("messages", "prompt", "model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("n", "max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("logit_bias", "bad_words", "logprobs", "top_logprobs", "prompt_logprobs", "presence_penalty"),
    "thinking_token_budget",
    *("frequency_penalty", "repetition_penalty", "response_format", "structured_outputs", "tools", "tool_choice"),
    *("deadline", "functions", "return_token_ids", "user", "metadata", "cache_salt", "priority", "best_of"),
    *("suffix", "echo", "modalities", "include_stop_str_in_output", "parallel_tool_calls", "function_call"),
    *("chat_template_kwargs", "service_tier", "store", "prediction", "reasoning_effort", "safety_identifier"),
    *("prompt_cache_key", "audio", "input", "verbosity"),
)
_ROUTES = (
    *(CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/models", "/v1/", "/v1/embeddings", "/../etc/passwd"),
    *("/%00", CHAT + "/", "/health", "//", "/metrics?x=1", "/trace", "/page.js", "/v1/responses", "/ready"),
    *("/version", "/docs", "/openapi.json", "/v1/models/%2e%2e", "/page.css/..%2f", "/*"),
)
_METHODS = ("POST", "GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "X" * 60, "post")
#: Texts of JSON that are no JSON, or that only some readers take.
_TEXTS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-0", "01", "1.", ".5", "+1", "0x10", '"\\ud800"'),
    *('"\\udc00\\ud800"', '"\\x"', '"\x00"', '"\\u0000"', "'a'", "[1,]", "{,}", "nul", "//x", '{"a":1,"a":2}'),
    *("1" * 5000, "-" * 50, "1e" + "9" * 50),
)


def _value(draw: random.Random) -> Any:
    """A value that a parameter should not have, or at the edge of what it may: drawn by class, not from a list."""
    sign = draw.choice((1, -1))
    match draw.randrange(12):
        case 0:
            return draw.choice((None, True, False, "", [], {}, [[]], [None], {"": None}))
        case 1:
            return sign * draw.choice(
                (0, 1, 2, draw.randrange(200), 2 ** draw.choice((31, 32, 53, 63, 64, 80)), 10**400)
            )
        case 2:
            return sign * draw.choice((0.0, 0.5, draw.random(), 5e-324, 1e308, 10.0 ** draw.uniform(-320, 308), 3.0))
        case 3:
            return draw.choice((float("nan"), float("inf"), float("-inf")))
        case 4:
            return letters(
                draw, size(draw, 1, 5000), draw.choice(("a", string.printable, "\x00\x01\x1b", "éß好🙂\u2028"))
            )
        case 5:
            return draw.choice(("\ud800", "\udfff\ud800", "a\udc80b", ["\ud83d"], {"\ud83d": "\ude42"}, "\ufeff"))
        case 6:
            return [_value(draw) for _ in range(draw.randint(1, 4))]
        case 7:
            return {
                letters(draw, draw.randint(0, 9), string.printable): _value(draw) for _ in range(draw.randint(1, 3))
            }
        case 8:
            return {
                str(draw.choice((0, 5, -1, 10**9, 2**70, "x", "1.5", "٣"))): draw.choice(
                    (0, 100, 101, None, "1", 1e308)
                )
            }
        case 9:
            return str(draw.choice((1, -1, 0.5, True, None, [1], "null", "auto", "none", "json_object")))
        case 10:
            return draw.choice(
                ({"type": "json_schema"}, {"type": 5}, {"type": "json_object"}, {"regex": 5}, {"json": []})
            )
        case _:
            return [draw.choice((0, -1, 2**70, 1.5, "a", None, True))] * size(draw, 1, 300)


def _base(draw: random.Random, scene: Scene) -> tuple[str, dict[str, Any]]:
    """A route and a body that is valid, with few tokens."""
    few = {"max_tokens": 2, "stream": draw.random() < 0.3}
    if draw.random() < 0.5:
        return COMPLETIONS, scene.completion(draw, **few)
    return CHAT, scene.chat(draw, **few)


def _fields(draw: random.Random, scene: Scene) -> Case:
    """A valid body with some fields replaced, removed or invented."""
    path, body = _base(draw, scene)
    for _ in range(draw.randint(1, 3)):
        match draw.randrange(6):
            case 0 if body:
                del body[draw.choice([*body])]
            case 1:
                body[letters(draw, draw.randint(0, 12), string.printable)] = _value(draw)
            case 2 if isinstance(messages := body.get("messages"), list) and messages and isinstance(messages[0], dict):
                messages[0][draw.choice(("role", "content", "name", "tool_calls", "tool_call_id", "x"))] = _value(draw)
            case 3 if isinstance(messages := body.get("messages"), list):
                messages.append(
                    draw.choice((_value(draw), {"role": draw.choice(("tool", "x", "assistant")), "content": "a"}))
                )
            case _:
                body[draw.choice(_FIELDS)] = deepcopy(_value(draw))
    if body.get("max_tokens") is None:  # an answer without a bound is as long as the context, and no fault
        body["max_tokens"] = scene.answer
    return Case.of(body, path)


def _text(draw: random.Random, scene: Scene) -> Case:
    """A valid body with bytes changed or cut off, in another encoding, or of another content type."""
    path, body = _base(draw, scene)
    data = bytearray(json.dumps(body).encode())
    kind = "application/json"
    match draw.randrange(7):
        case 0:
            del data[draw.randrange(len(data)) :]
        case 1:
            for _ in range(draw.randint(1, 8)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        case 2:
            data = bytearray(json.dumps(body).encode(draw.choice(("utf-16", "utf-32", "utf-7", "utf-8-sig", "cp037"))))
        case 3:
            data = bytearray(draw.randbytes(size(draw, 1, 20_000)))
        case 4:
            kind = draw.choice(
                (
                    "",
                    "text/plain",
                    "multipart/form-data",
                    "application/xml",
                    "application/json; charset=no",
                    "application/x-www-form-urlencoded",
                    "APPLICATION/JSON",
                    "application/vnd.x+json",
                )
            )
        case 5:
            inserted = f', "{draw.choice(_FIELDS)}": {draw.choice(_TEXTS)}}}'
            data[-1:] = inserted.encode("utf-8", "surrogatepass")
        case _:  # a key twice, the last one counts
            data[-1:] = f', "max_tokens": {draw.choice((1, -1))}, "max_tokens": {draw.choice((1, 2))}}}'.encode()
    return Case(bytes(data), path, headers={"content-type": kind})


def _nested(draw: random.Random, scene: Scene) -> Case:
    """A very deep or long value, of a known field or as the whole body."""
    path, depth = draw.choice((CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/trace")), size(draw, 50, 100_000)
    value = draw.choice(
        (
            "[" * depth + "]" * depth,
            '{"a":' * depth + "1" + "}" * depth,
            "9" * depth,
            "[" * depth,
            '{"a":[' * depth,
            '{"' + "a" * depth + '":1}',
            '[{"role":' * depth,
            "[" + "1," * depth + "1]",
            '{"a":1,' * depth,
            "-" * depth,
            "{" + ",".join(f'"k{n}":{n}' for n in range(depth // 10)) + "}",
            "0." + "0" * depth + "1",
            '"' + "\\u0000" * (depth // 6) + '"',
        )
    )
    if draw.random() < 0.2:
        return Case(value.encode(), path)
    filled = {"prompt": "w5", "messages": [{"role": "user", "content": "w5"}]}
    head = json.dumps({name: filled[name]} if (name := draw.choice((*filled, ""))) else {})[:-1]
    return Case(f'{head}{"," if name else ""}"{draw.choice(_FIELDS)}": {value}}}'.encode(), path)


def _routes(draw: random.Random, scene: Scene) -> Case:
    """A route or method that does not exist, or headers that are not right."""
    name = draw.choice(
        (
            *("content-type", "authorization", "x-request-id", "accept-encoding", "expect", "traceparent"),
            *("tracestate", "cookie", "origin", "x-forwarded-for", "content-encoding", "upgrade", "range", "host"),
            *("accept", "te", "access-control-request-method"),
        )
    )
    value = draw.choice(
        (
            *("", "x" * size(draw, 10, 60_000), "application/json; charset=nope", "Bearer ", "\t", "100-continue"),
            *("gzip", "websocket", '","level":"error', "00-" + "f" * 32 + "-" + "f" * 16 + "-01", "%00%0a"),
            *("bytes=0-1,0-2," * 900, "é".encode().decode("latin-1")),
        )
    )
    path = draw.choice(
        (*_ROUTES, "/" + quote(letters(draw, size(draw, 1, 3000), string.printable + "é\x00🙂")), "/" + "a/" * 900)
    )
    body = b"" if draw.random() < 0.5 else draw.choice((draw.randbytes(10), b"{}", b"[]", b'"a"', b"null", b"0"))
    return Case(body, path, draw.choice(_METHODS), {name: value})


KINDS = (Kind("fields", _fields, 8), Kind("text", _text, 8), Kind("nested", _nested, 8), Kind("routes", _routes, 8))
