"""A server in a process of its own, and what the operating system and /metrics say about it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load.client import Client, HttpClient
from d2sd.errors import D2SDError

#: The program `d2sd` of this Python.
D2SD = [sys.executable, "-c", "from d2sd.cli.main import main; main()"]
_LISTENING = re.compile(r"serving .* at (http://[0-9.]+:[0-9]+)")
_TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """`d2sd serve`: one that runs already, or one that `start` has started."""

    def __init__(
        self,
        url: str,
        bundle: Path | None = None,
        process: subprocess.Popen[bytes] | None = None,
        log: Path | None = None,
    ) -> None:
        self.url, self.bundle, self.process, self.log = url.rstrip("/"), bundle, process, log

    @classmethod
    def start(cls, bundle: Path, log: Path, options: Sequence[str] = ()) -> Server:
        """Start a server on free ports of the loopback device; its log goes to a file. Returns when it is ready.

        `options` are those of `d2sd serve`. Raises D2SDError with the end of the log if it ends or is never ready.
        """
        process = spawn([*D2SD, "serve", str(bundle), "--port", "0", *options], log)

        def url() -> str | None:
            found = _LISTENING.search(log.read_text(errors="replace"))
            return found[1] if found and answers(f"{found[1]}/ready") else None

        return cls(wait_until(url, [process], log), bundle, process, log)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, timeout: float = 60) -> int | None:
        """End a process that was started here with SIGTERM; its exit code, negative for a signal."""
        return None if self.process is None else end(self.process, timeout)

    def connect(self, *, connections: int = 256) -> Client:
        """A client of the server."""
        return HttpClient(self.url, connections=connections)

    @property
    def model(self) -> str:
        """The name of the served model."""
        return str(httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"][0]["id"])

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.rpartition("//")[2].partition(":")
        return host, int(port)

    @property
    def metrics_url(self) -> str:
        return f"{self.url}/metrics"

    def processes(self) -> list[int]:
        """The processes of the server that were started here."""
        return [] if self.process is None else family(self.process.pid)

    def cpu_seconds(self) -> float | None:
        """Processor time of all processes since the start, ended ones included; None without one."""
        spent = [sum(map(int, _fields(pid)[11:15])) / _TICKS for pid in self.processes()]
        return sum(spent) if spent else None

    def thread_seconds(self) -> dict[int, float]:
        """Processor time of every thread, by its id."""
        tasks = [task for pid in self.processes() for task in Path(f"/proc/{pid}/task").glob("*")]
        spent = {int(task.name): _read(task / "schedstat").split() for task in tasks}
        return {thread: int(found[0]) / 1e9 for thread, found in spent.items() if found}

    def resident_bytes(self) -> int:
        """Resident memory of the processes."""
        found = [_read(Path(f"/proc/{pid}/statm")).split() for pid in self.processes()]
        return sum(int(fields[1]) for fields in found if fields) * os.sysconf("SC_PAGE_SIZE")

    def metrics(self) -> dict[str, float]:
        """Sum over labels of every sample of /metrics."""
        values: dict[str, float] = {}
        for group in text_string_to_metric_families(httpx.get(self.metrics_url, timeout=60).text):
            for sample in group.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def accepts(self) -> bool:
        """Whether it accepts connections."""
        with socket.socket() as probe:
            return probe.connect_ex(self.address) == 0


def spawn(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a process whose output goes to `log`."""
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=environment)


def wait_until(
    ready: Callable[[], str | None], processes: Sequence[subprocess.Popen[bytes]], log: Path, timeout: float = 600
) -> str:
    """Returns what `ready` gives once that is not None; if a process has ended or time is up, kill all and raise."""
    last = time.monotonic() + timeout
    while all(process.poll() is None for process in processes) and time.monotonic() < last:
        if (found := ready()) is not None:
            return found
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()
    tail = log.read_text(errors="replace")[-2000:]
    raise D2SDError("The server did not start.", where=log, found=tail, expected=f"ready within {timeout:g} s")


def end(process: subprocess.Popen[bytes], timeout: float) -> int:
    """End a process with SIGTERM; its exit code. One that is still there after `timeout` seconds is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def answers(url: str) -> bool:
    """Whether a URL answers with status 200."""
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def family(pid: int) -> list[int]:
    """A process and all below it."""
    parents = {int(stat.parent.name): _fields(int(stat.parent.name))[1:2] for stat in Path("/proc").glob("[0-9]*/stat")}
    found = [pid]
    for parent in found:
        found += [child for child, above in parents.items() if above == [str(parent)]]
    return found


def _fields(pid: int) -> list[str]:
    """The fields of a process's `stat` from the third, its state, on; none if it has ended."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _read(path: Path) -> str:
    """A file of /proc; empty if its process or thread has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
