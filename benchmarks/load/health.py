"""Reads the health of a server after load: pages and requests that are left, errors in its log."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

from benchmarks.load.server import Server

#: Seconds after which the metrics of every face are up to date.
_PUBLISHED = 1.0
#: An error in a log that is not JSON: of Python, d2sd or Triton, which also notes that there is no GPU, and that its
#: exit timeout has expired: Triton 24.10 may wait for a stream that was closed. The exit code tells that too.
_ERROR = re.compile(r"Traceback|^E[0-9]{4} (?!.*(CudaDriverHelper|Exit timeout))|\bERROR d2sd|panicked")


async def idle_pages(server: Server, timeout: float = 30) -> dict[str, float]:
    """The metrics once no request is in the server, or after `timeout` seconds."""
    end = time.monotonic() + timeout
    await asyncio.sleep(_PUBLISHED)
    while True:
        metrics = await asyncio.to_thread(server.metrics)
        names = ("d2sd_num_requests_running", "d2sd_num_requests_waiting", "d2sd_kv_pages_used")
        found = {name: metrics[name] for name in names}
        if not any(found.values()) or time.monotonic() > end:
            return found
        await asyncio.sleep(0.5)


def bad_lines(log: Path, *, json_lines: bool = True) -> list[str]:
    """Lines of the log that report an internal error; of a log in JSON also those that are not JSON."""
    if not json_lines:
        return [line for line in log.read_text(errors="replace").splitlines() if _ERROR.search(line)]
    bad = []
    for line in log.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            bad.append(line)
        else:
            if "error" in entry or entry.get("level") in ("error", "critical") or entry.get("status") == 500:
                bad.append(line)
    return bad
