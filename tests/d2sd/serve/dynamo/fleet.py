"""A frontend and workers of Dynamo on the loopback interface: processes of the environment of `make dynamo-test`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load.dynamo import free_port, loopback
from tests.processes import alive

#: Seconds until a process must be up; most of them are imports, on a loaded machine.
_START = 120.0


@dataclass
class Process:
    """One process of the fleet; its output is in `log`."""

    pid: int
    log: Path
    port: int  # of its HTTP or system server

    @property
    def alive(self) -> bool:
        return alive(self.pid)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self, sent: signal.Signals = signal.SIGKILL, timeout: float = 60) -> None:
        """Signal the process and wait for its end."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, sent)
        end = time.monotonic() + timeout
        while self.alive:
            assert time.monotonic() < end, f"{self.pid} does not end\n{self.text()[-3000:]}"
            time.sleep(0.02)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Fleet:
    """One frontend and its workers."""

    folder: Path
    model: str
    environment: dict[str, str]
    nursery: subprocess.Popen[str]
    frontend: Process | None = None
    workers: list[Process] = field(default_factory=list)  # that should be alive
    ended: list[Process] = field(default_factory=list)
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_frontend(self, *options: str) -> None:
        if self.frontend is not None:
            self.frontend.end()
        port, log = free_port(), self.folder / f"frontend{len(self.children)}.log"
        command = [sys.executable, "-m", "dynamo.frontend", "--http-port", str(port), "--discovery-backend", "file"]
        with log.open("wb") as out:
            child = subprocess.Popen(
                [*command, "--request-plane", "tcp", *options],
                env=self.environment,
                stdout=out,
                stderr=out,
                cwd=self.folder,
            )
        self.children.append(child)
        threading.Thread(target=child.wait, daemon=True).start()  # reaps it
        self.frontend = Process(child.pid, log, port)

    def start_worker(self, bundle: Path, *options: str, **variables: str) -> Process:
        port, log = free_port(), self.folder / f"worker{len(self.workers) + len(self.ended)}.log"
        order = {
            "argv": ["worker", str(bundle), "--dynamo", "--model", self.model, *options],
            "environ": self.environment | {"DYN_SYSTEM_PORT": str(port)} | variables,
            "log": str(log),
        }
        assert self.nursery.stdin is not None
        assert self.nursery.stdout is not None
        self.nursery.stdin.write(json.dumps(order) + "\n")
        self.nursery.stdin.flush()
        worker = Process(int(self.nursery.stdout.readline()), log, port)
        self.workers.append(worker)
        return worker

    def end_worker(self, worker: Process, sent: signal.Signals = signal.SIGKILL) -> None:
        """Signal a worker and wait for its end; the frontend may learn of it later."""
        self.workers.remove(worker)
        self.ended.append(worker)
        worker.end(sent)

    @property
    def url(self) -> str:
        assert self.frontend is not None
        return self.frontend.url

    def wait(self) -> None:
        """Until the frontend knows the model and exactly the workers that run."""
        end = time.monotonic() + _START
        while time.monotonic() < end:
            for process in [self.frontend, *self.workers]:
                assert process is not None
                assert process.alive, process.text()[-4000:]
            known = self.instances()
            if len(known) == len(self.workers) and all(map(_listens, known)) and self._answers():
                return
            time.sleep(0.2)
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

    def end(self) -> None:
        """End every process that still runs, by its id."""
        for process in [*self.workers, *self.ended, self.frontend]:
            if process is not None:
                process.end()
        self.nursery.kill()
        self.nursery.wait()


@contextmanager
def fleet(folder: Path, model: str = "tiny") -> Iterator[Fleet]:
    """An empty fleet in a new folder; every process is ended at the exit."""
    for name in ("store", "home"):
        (folder / name).mkdir(parents=True)
    environment = loopback(folder / "store", folder / "home")
    nursery = subprocess.Popen(
        [sys.executable, "-m", "tests.d2sd.serve.dynamo.nursery"],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    made = Fleet(folder, model, environment, nursery)
    try:
        assert nursery.stdout is not None
        assert nursery.stdout.readline() == "ready\n"
        yield made
    finally:
        made.end()


def _listens(instance: Any) -> bool:
    """Whether the worker is there: a killed one stays registered for some seconds."""
    port = int(instance["transport"]["tcp"].split("/")[0].rsplit(":", 1)[1])
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


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


def post(url: str, path: str, body: dict[str, Any], timeout: float = 120) -> Generator[dict[str, Any], None, None]:
    """The events of a streamed request, or its one answer. Raises `Refused`, also for an error in the stream."""
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
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


def complete(
    url: str, model: str, prompt: str, heard: Callable[[str], object] = str, **options: Any
) -> tuple[str, str | None]:
    """Text and finish reason of a completion, streamed unless stream=False; `heard` gets each piece as it arrives."""
    body = {"model": model, "prompt": prompt, "stream": True} | options
    text, finish = "", None
    for event in post(url, "/v1/completions", body):
        for choice in event["choices"]:
            text += choice["text"]
            heard(choice["text"])
            finish = choice.get("finish_reason") or finish
    return text, finish
