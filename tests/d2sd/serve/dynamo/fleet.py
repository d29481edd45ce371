"""A frontend and workers of Dynamo on the loopback interface: processes of the environment of `make dynamo-test`."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: Seconds until a process must be up; most of them are imports, on a loaded machine.
_START = 120.0


def free_port() -> int:
    """A free port below 32768: Dynamo 1.4 reads DYN_SYSTEM_PORT as a signed number of 16 bits."""
    for port in random.sample(range(20000, 32768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def loopback(store: Path, home: Path) -> dict[str, str]:
    """The environment of every process: file discovery, and no port beyond the loopback interface."""
    old = tuple(map(int, version("ai-dynamo").split(".")[:2])) < (1, 6)
    return {
        **os.environ, "DYN_FILE_KV": str(store), "HOME": str(home), "HF_HUB_OFFLINE": "1", "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        "DYN_HTTP_HOST": "127.0.0.1", "DYN_SYSTEM_HOST": "127.0.0.1", "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo" if old else "127.0.0.1",  # before 1.6 the name of an interface
        "DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@dataclass
class Process:
    """One process of the fleet; its output is in `log`."""

    child: subprocess.Popen[bytes]
    log: Path
    port: int  # of its HTTP or system server

    def end(self, sent: signal.Signals = signal.SIGKILL) -> None:
        """Signal the process and wait for its end."""
        if self.child.poll() is None:
            self.child.send_signal(sent)
        self.child.wait(60)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Fleet:
    """One frontend and its workers."""

    folder: Path
    model: str
    environment: dict[str, str]
    frontend: Process | None = None
    workers: list[Process] = field(default_factory=list)
    started: int = 0

    def start_frontend(self, *options: str) -> None:
        port = free_port()
        command = ["-m", "dynamo.frontend", "--http-port", str(port), "--discovery-backend", "file"]
        self.frontend = self._start([*command, "--request-plane", "tcp", *options], port, {})

    def start_worker(self, bundle: Path, *options: str, **variables: str) -> Process:
        port = free_port()
        command = ["-c", "from d2sd.cli.main import main; main()", "worker", str(bundle), "--dynamo", "--model", self.model, *options]
        worker = self._start(command, port, {"DYN_SYSTEM_PORT": str(port), **variables})
        self.workers.append(worker)
        return worker

    def _start(self, command: list[str], port: int, variables: dict[str, str]) -> Process:
        self.started += 1
        log = self.folder / f"{self.started}.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                [sys.executable, *command], env=self.environment | variables, stdout=out, stderr=out,
                cwd=self.folder,
            )  # fmt: skip
        return Process(child, log, port)

    @property
    def url(self) -> str:
        assert self.frontend is not None
        return f"http://127.0.0.1:{self.frontend.port}"

    def wait(self, workers: int | None = None) -> None:
        """Until the frontend knows the model and as many workers as run."""
        end = time.monotonic() + _START
        while time.monotonic() < end:
            for process in [self.frontend, *self.workers]:
                assert process is not None
                assert process.child.poll() is None, process.text()[-4000:]
            if len(self.instances()) == (len(self.workers) if workers is None else workers) and self._answers():
                return
            time.sleep(0.3)
        raise AssertionError("\n".join(p.text()[-3000:] for p in [self.frontend, *self.workers] if p))

    def _answers(self) -> bool:
        try:
            return bool(fetch(f"{self.url}/v1/models")["data"])
        except (OSError, ValueError):
            return False

    def instances(self) -> list[Any]:
        """The endpoints of workers that the frontend knows."""
        try:
            found = fetch(f"{self.url}/health").get("instances", [])
        except (OSError, ValueError):
            return []
        return [entry for entry in found if entry.get("endpoint") == "generate"]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric of the frontend."""
        return metric(self.url, name, **labels)

    def end(self) -> None:
        """End every process that still runs, by its id."""
        for process in [*self.workers, self.frontend]:
            if process is not None:
                process.end()


@contextmanager
def fleet(folder: Path, model: str = "tiny") -> Iterator[Fleet]:
    """An empty fleet in a new folder; every process is ended at the exit."""
    for name in ("store", "home"):
        (folder / name).mkdir(parents=True)
    made = Fleet(folder, model, loopback(folder / "store", folder / "home"))
    try:
        yield made
    finally:
        made.end()


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def metric(url: str, name: str, **labels: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [line for line in lines if line.split("{")[0].split(" ")[0] == name and all(w in line for w in wanted)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


class Refused(Exception):
    """The frontend answered with an error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


def post(url: str, path: str, body: dict[str, Any], timeout: float = 120) -> Iterator[dict[str, Any]]:
    """The events of a streamed request, or its one answer. Raises `Refused`, also for an error in the stream."""
    request = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            if not body.get("stream"):
                yield json.load(response)
                return
            done = False
            for line in response:
                text = line.decode().strip()
                if text.startswith("event: error") or '"error"' in text[:20]:
                    raise Refused(200, text + response.read().decode())
                if text == "data: [DONE]":
                    done = True
                elif text.startswith("data: "):
                    event = json.loads(text[6:])
                    if "error" in event:
                        raise Refused(200, text)
                    yield event
            assert done, "the stream broke off"
    except urllib.error.HTTPError as error:
        raise Refused(error.code, error.read().decode()) from None


def complete(url: str, model: str, prompt: str, **options: Any) -> tuple[str, str | None]:
    """Text and finish reason of a completion, streamed unless stream=False."""
    body = {"model": model, "prompt": prompt, "stream": True} | options
    text, finish = "", None
    for event in post(url, "/v1/completions", body):
        for choice in event["choices"]:
            text += choice["text"]
            finish = choice.get("finish_reason") or finish
    return text, finish
