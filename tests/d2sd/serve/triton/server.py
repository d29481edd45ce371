"""A real Triton server in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.load.triton import free_ports
from tests.d2sd.serve.http import wait_until
from tests.processes import alive


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


class Triton:
    """A running server. `stubs` are the processes below it."""

    def __init__(self, repository: Path, log: Path, *options: str, model: str = "tiny") -> None:
        self.model, self.log = model, log
        self.http, self.grpc, self.metrics_port = free_ports(3)
        ports = {"http": self.http, "grpc": self.grpc, "metrics": self.metrics_port}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "d2sd.serve.triton.run",
                str(repository),
                "--model-control-mode=explicit",
                f"--load-model={model}",
                *(f"--{name}-port={port}" for name, port in ports.items()),
                *(f"--{name}-address=127.0.0.1" for name in ports),
                *options,
            ],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until(lambda: self.ready() or self.process.poll() is not None, 100)
            assert self.process.poll() is None, log.read_text(errors="replace")[-4000:]
        except BaseException:
            self.kill()
            raise
        self.stubs = self.processes()
        assert len(self.stubs) == 2

    def processes(self) -> list[int]:
        """The processes of the models, and the shells that watch them."""
        stubs = children(self.process.pid)
        return [*stubs, *(pid for stub in stubs for pid in children(stub))]

    def ready(self) -> bool:
        return self.status(f"/v2/models/{self.model}/ready") == 200

    def status(self, path: str, body: Any = None) -> int:
        return self.call(path, body)[0]

    def call(self, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text of an HTTP request; 0 where nothing listens."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", data, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def generate(self, **inputs: Any) -> dict[str, Any]:
        status, text = self.call(f"/v2/models/{self.model}/generate", inputs)
        return {"status": status, **json.loads(text)}

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        return sum(float(value) for value in re.findall(rf"^d2sd_{name}{{.*}} (.+)$", text, flags=re.M))

    def load(self, *, unload: bool = False) -> int:
        return self.status(f"/v2/repository/models/{self.model}/{'unload' if unload else 'load'}", {})

    def stop(self, how: signal.Signals, seconds: float = 30) -> float:
        """Send a signal; returns the seconds until the server and every process of its models have ended."""
        begun = time.monotonic()
        self.process.send_signal(how)
        self.process.wait(seconds)
        wait_until(lambda: not any(map(alive, self.stubs)), 10)  # a watching shell looks twice a second
        return time.monotonic() - begun

    def kill(self) -> None:
        """End what is left, by process id."""
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(repository: Path, log: Path, *options: str, model: str = "tiny") -> Iterator[Triton]:
    server = Triton(repository, log, *options, model=model)
    try:
        yield server
        if server.process.poll() is None:
            server.stop(signal.SIGTERM, 100)
    finally:
        server.kill()
