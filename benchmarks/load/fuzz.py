"""Sends malformed requests and judges the answers: a refusal with an error body or a success, no 5xx and no hang."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from urllib.parse import urlsplit

import httpx

from benchmarks.load.client import error_of
from benchmarks.load.malformed import Malformed, malformed

#: Seconds after which a request counts as a hang.
_HANG = 60.0


#: A request that httpx itself refuses to send.
_NOT_SENT = "not sent: the client refuses it"


async def fuzz(url: str, seeds: range, *, at_once: int = 4) -> tuple[Counter[str], list[str]]:
    """Outcomes by name, and the faults; a fault names its seed.

    As many requests are sent as there are `seeds`: those that the client refuses are replaced by later seeds.
    """
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    numbers, left = count(seeds.start), len(seeds)

    async def sender() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=_HANG) as client:
            nonlocal left
            while left > 0:
                left, seed = left - 1, next(numbers)
                try:
                    outcome = await asyncio.wait_for(_one(client, url, malformed(seed)), _HANG)
                    outcomes[outcome] += 1
                    left += outcome == _NOT_SENT
                except Exception as error:
                    faults.append(f"seed {seed}: {type(error).__name__}: {error}")

    await asyncio.gather(*(sender() for _ in range(at_once)))
    return outcomes, faults


async def _one(client: httpx.AsyncClient, url: str, request: Malformed) -> str:
    if request.raw:
        return await _raw(url, request.body)
    try:
        response = await client.request(request.method, request.path, headers=request.headers, content=request.body)
    except (httpx.LocalProtocolError, httpx.InvalidURL, UnicodeError):
        return _NOT_SENT
    status = response.status_code
    if status >= 500:
        raise ValueError(f"status {status}: {response.text[:200]}")
    if status >= 400 and request.method != "HEAD":
        error_of(response.content)
    return f"status {status}"


async def _raw(url: str, data: bytes) -> str:
    """Send bytes; a server that waits for the rest of a body is right to do so, so we hang up after a while."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(data)
        await writer.drain()
        head = await asyncio.wait_for(reader.read(200), 1.0)
    except asyncio.TimeoutError:
        return "raw bytes: the server waits for more"
    except ConnectionError:
        return "raw bytes: connection closed"
    finally:
        writer.close()
    if b" 500 " in head[:20]:
        raise ValueError(f"{head!r}")
    return f"raw bytes: {head[9:12].decode('latin-1') or 'connection closed'}"
