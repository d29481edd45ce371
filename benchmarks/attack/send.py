"""Sends hostile requests and notes what came back."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.load.client import error_of
from tools.hostile.case import Case, Kind, Scene

#: A request that httpx itself refuses to send.
NOT_SENT = "not sent"
#: A request that the client has given up.
NO_ANSWER = "no answer"
#: What uvicorn answers to a request that its parser refuses.
_NO_HTTP = b"Invalid HTTP request received."
#: Seconds in which a server may answer bytes that are no request; it may as well wait for more.
_PATIENCE = 1.0
#: An error of the server as the event of a stream that has begun with status 200.
_FAILED = re.compile(rb'^data: \{"error":.*"type": ?"server_error".*', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sent:
    """The outcome of one request: a status, or a word for what there was in its place."""

    kind: str
    number: int
    case: Case
    outcome: str
    seconds: float
    answer: bytes = b""  # the body of a 200
    fault: str = ""  # why no server should answer so
    by_right: bool = False  # it may take long, as its class fills the batch

    @property
    def where(self) -> str:
        return f"{self.kind}, number {self.number}"


async def send(
    url: str, kind: Kind, cases: Sequence[Case], seed: int, scene: Scene, timeout: float, seconds: float
) -> list[Sent]:
    """Send requests of a class, as many at once as it says, for at most `seconds`.

    `cases` are those of the first numbers, made before: a client's own work is another machine's. What the client
    itself refuses to send is replaced. A request without an answer within `timeout` seconds is left.
    """
    sent: list[Sent] = []
    source, left, last = count(), len(cases), time.monotonic() + seconds

    async def sender() -> None:
        nonlocal left
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            while left > 0 and time.monotonic() < last:
                left, number = left - 1, next(source)
                made = number < len(cases)
                case = cases[number] if made else await asyncio.to_thread(kind.case, seed, number, scene)
                begun = time.monotonic()
                outcome, answer, fault = await _outcome(client, url, case, timeout)
                left += outcome == NOT_SENT
                sent.append(Sent(kind.name, number, case, outcome, time.monotonic() - begun, answer, fault, kind.fills))

    await asyncio.gather(*(sender() for _ in range(min(kind.at_once, len(cases)))))
    return sent


async def _outcome(client: httpx.AsyncClient, url: str, case: Case, timeout: float) -> tuple[str, bytes, str]:
    """Outcome, the body of a 200, and a fault."""
    try:
        if case.raw or case.leaves is not None:
            return await asyncio.wait_for(_raw(url, case), timeout)
        return await asyncio.wait_for(_asked(client, case), timeout)
    except (asyncio.TimeoutError, TimeoutError):
        return NO_ANSWER, b"", f"no answer within {timeout:g} s"
    except httpx.LocalProtocolError:
        return NOT_SENT, b"", ""
    except (httpx.TransportError, OSError) as error:
        # a server may close while a body that it refuses is being sent; one that is gone is found by its neighbours
        return f"closed ({type(error).__name__})", b"", ""
    except (httpx.InvalidURL, UnicodeError, ValueError):
        return NOT_SENT, b"", ""


async def _asked(client: httpx.AsyncClient, case: Case) -> tuple[str, bytes, str]:
    response = await client.request(case.method, case.path, headers=case.headers, content=case.body)
    status, fault = response.status_code, ""
    if status >= 400 and case.method != "HEAD" and response.content != _NO_HTTP:
        try:
            error_of(response.content)
        except ValueError as error:
            fault = str(error)
    elif status == 200 and (failed := _FAILED.search(response.content)):
        fault = f"the stream ends in {failed[0].decode(errors='replace')[:200]}"
    return str(status), response.content if status == 200 else b"", fault


async def _raw(url: str, case: Case) -> tuple[str, bytes, str]:
    """Write bytes, or a request that is left; the connection ends with a reset."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"{case.method} {case.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    whole = (0.0, f"{head}content-length: {len(case.body)}\r\n\r\n".encode() + case.body)
    try:
        for wait, data in case.raw or (whole,):
            await asyncio.sleep(wait)
            writer.write(data)
            await writer.drain()
        patience = _PATIENCE if case.leaves is None else case.leaves
        answer = await asyncio.wait_for(reader.read(300), patience) if patience else b""
    except (asyncio.TimeoutError, TimeoutError):
        return "left", b"", ""
    except ConnectionError:
        return "closed", b"", ""
    finally:
        _reset(writer)
    status = answer[9:12].decode("latin-1")
    return (status if status.isdigit() else "left"), b"", ""


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection so that the other side meets a reset, not an end."""
    raw: Any = writer.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
