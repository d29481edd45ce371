"""`d2sd serve` in a process of its own, and what the operating system and /metrics say about it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx
from prometheus_client.parser import text_string_to_metric_families

from d2sd.errors import D2SDError

_LISTENING = re.compile(r"serving .* at (http://[0-9.]+:[0-9]+)")
_D2SD = "from d2sd.cli.main import main; main()"
_TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """An HTTP server under test: one that runs already, or one that `start` has started."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None = None, log: Path | None = None) -> None:
        self.url, self.process, self.log = url.rstrip("/"), process, log

    @classmethod
    def start(cls, bundle: Path, log: Path, options: Sequence[str] = (), *, timeout: float = 600) -> Server:
        """Start `d2sd serve` on a free port of the loopback device; its log goes to a file. Returns when it is ready.

        Raises D2SDError with the end of the log if it ends, or is not ready within `timeout` seconds.
        """
        command = [sys.executable, "-c", _D2SD, "serve", str(bundle), "--port", "0", *options]
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)
        end = time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < end:
            found = _LISTENING.search(log.read_text(errors="replace"))
            if found and _ready(found[1]):
                return cls(found[1], process, log)
            time.sleep(0.1)
        if process.poll() is None:
            process.kill()
            process.wait()
        tail = log.read_text(errors="replace")[-2000:]
        raise D2SDError("The server did not start.", where=log, found=tail, expected=f"ready within {timeout:g} s")

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, timeout: float = 60) -> int | None:
        """End a process that was started here with SIGTERM; its exit code, negative for a signal."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    @property
    def model(self) -> str:
        """The name of the served model."""
        return str(httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"][0]["id"])

    def cpu_seconds(self) -> float | None:
        """Processor time of all threads since the start; None for a server that was not started here."""
        if self.process is None:
            return None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def thread_seconds(self) -> dict[int, float]:
        """Processor time of every thread of the process, by its id."""
        assert self.process is not None
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return {int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}

    def resident_bytes(self) -> int:
        """Resident memory of the process."""
        assert self.process is not None
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def metrics(self) -> dict[str, float]:
        """Sum over labels of every sample of /metrics."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=60).text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
