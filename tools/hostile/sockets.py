"""Bytes for the socket: garbage, lying lengths, chunks, floods of headers, resets, and clients that drip."""

from __future__ import annotations

import json
import random

from tools.hostile.case import Case, Kind, Scene, size

_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
#: Seconds between two drops of a client that drips.
_DRIP = 0.3


def _body(draw: random.Random, scene: Scene, **fields: object) -> bytes:
    return json.dumps(scene.completion(draw, max_tokens=1, **fields)).encode()


def _with_length(body: bytes, length: int | None = None) -> bytes:
    return _HEAD + b"content-length: %d\r\n\r\n" % (len(body) if length is None else length) + body


def _chunks(draw: random.Random, body: bytes) -> bytes:
    """A body in chunks of random sizes."""
    data = b""
    while body:
        count = draw.randint(1, 40)
        data += b"%x\r\n" % len(body[:count]) + body[:count] + b"\r\n"
        body = body[count:]
    return _HEAD + b"transfer-encoding: chunked\r\n\r\n" + data + b"0\r\n\r\n"


def _garbage(draw: random.Random, scene: Scene) -> Case:
    """No HTTP, or HTTP that is wrong."""
    body = _body(draw, scene)
    data = draw.choice(
        (
            draw.randbytes(size(draw, 1, 4000)),
            b"GET / HTTP/9.9\r\n\r\n",
            b"\r\n" * size(draw, 2, 500),
            b"G" * size(draw, 10, 90_000),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(300),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(60),
            b"GET  /health HTTP/1.1\r\n\r\n",
            b"GET /health\r\n",
            b"GET http://127.0.0.1:1/x HTTP/1.1\r\nhost: y\r\n\r\n",
            b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
            b"GET /\x00\xff HTTP/1.1\r\nhost: \xff\r\n\r\n",
            _HEAD.replace(b"\r\n", b"\n") + b"\n",
            b"GET /health HTTP/1.1\r\nhost: localhost\r\na b: c\r\n\r\n",
            b"GET /health HTTP/1.1\r\n folded: x\r\n\r\n",
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
            + draw.randbytes(50),
            _with_length(body) + draw.randbytes(200),
            _with_length(body) * draw.randint(2, 30),
            b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * size(draw, 2, 400),
        )
    )
    return Case(raw=((0.0, data),))


def _lengths(draw: random.Random, scene: Scene) -> Case:
    """Lengths and chunks that are not those of the body."""
    body = _body(draw, scene)
    length = draw.choice(
        (
            *(b"-1", b"1e3", b"9" * size(draw, 5, 5000), b"", b"+5", b"0x10", b"5, 5", b"\xd9\xa3", b" 5 "),
            b"5\r\ncontent-length: 6",
        )
    )
    chunked = _HEAD + b"transfer-encoding: chunked\r\n\r\n"
    data = draw.choice(
        (
            _HEAD + b"content-length: " + length + b"\r\n\r\n" + body,
            _with_length(body, draw.randrange(len(body))),
            _with_length(body, len(body) + size(draw, 1, 10**7)),
            chunked + b"zz\r\n" + body,
            chunked + b"ffffffff\r\n" + body,
            chunked + b"f" * size(draw, 17, 9000) + b"\r\n",
            chunked + b"-5\r\nabcde\r\n",
            chunked + b"5;x=" + b"y" * 9000 + b"\r\nabcde\r\n",
            _chunks(draw, body),
            _chunks(draw, body)[: -draw.randint(1, 30)],
            chunked + b"0\r\n" + b"a: b\r\n" * 3000 + b"\r\n",
            _HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
            _HEAD + b"expect: 100-continue\r\n" + b"content-length: %d\r\n\r\n" % len(body),
            _HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + _chunks(draw, body)[-40:],
        )
    )
    return Case(raw=((0.0, data),))


def _headers(draw: random.Random, scene: Scene) -> Case:
    """Many headers, or a long one."""
    count = size(draw, 50, 5000)
    one = b"a: " + b"b" * size(draw, 1000, 500_000) + b"\r\n"
    many = b"".join(b"x-%d: %d\r\n" % (n, n) for n in range(count))
    ids = (
        b"x-request-id: "
        + draw.choice((b"a" * 200, b'","level":"error","status":500,"x":"', b"\x1b[31m", b"{}", b"a\tb"))
        + b"\r\n"
    )
    body = _body(draw, scene)
    return Case(raw=((0.0, _HEAD + draw.choice((one, many, ids, one + many)) + _with_length(body)[len(_HEAD) :]),))


def _resets(draw: random.Random, scene: Scene) -> Case:
    """The connection is reset within the head or the body, before the answer, or within a stream."""
    streamed = draw.random() < 0.4
    long = scene.context // 4 if streamed else 1
    data = _with_length(
        _body(draw, scene)
        if not streamed
        else json.dumps(scene.completion(draw, stream=True, max_tokens=long, ignore_eos=True)).encode()
    )
    cut = len(data) if streamed or draw.random() < 0.4 else draw.randrange(1, len(data))
    return Case(raw=((0.0, data[:cut]),), leaves=draw.choice((0.0, draw.uniform(0, 0.4))))


def _drips(draw: random.Random, scene: Scene) -> Case:
    """A few bytes from time to time: of the head, or of the body."""
    data = _with_length(_body(draw, scene))
    at = draw.randrange(1, len(data))
    drops = draw.randint(2, 12)
    step = max(1, (len(data) - at) // draw.randint(drops, 200))
    return Case(
        raw=((0.0, data[:at]), *((_DRIP, data[at + n * step : at + (n + 1) * step]) for n in range(drops))), leaves=1.0
    )


KINDS = (
    Kind("socket: garbage", _garbage, 8),
    Kind("socket: lengths", _lengths, 8),
    Kind("socket: headers", _headers, 8),
    Kind("socket: resets", _resets, 8),
    Kind("socket: drips", _drips, 48),
)
