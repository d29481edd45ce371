"""The life of one server under attack: quiet neighbours first, then class after class of hostile requests."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any

import httpx

from benchmarks.attack import verdicts
from benchmarks.attack.neighbours import Neighbours, Visit
from benchmarks.attack.plan import Plan
from benchmarks.attack.send import Sent, send
from benchmarks.attack.verdicts import Delays
from benchmarks.attack.watch import Watch, kill
from benchmarks.load.health import bad_lines, idle_pages
from benchmarks.load.server import Server
from d2sd.errors import D2SDError
from tools.hostile.case import CHAT, Case, Kind, Scene

#: Series of /metrics that appear with the first request of their kind.
_NEW_SERIES = 40
#: One harmless request of every kind: what a server loads at its first use belongs to the memory it starts with.
_FIRST_USES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (CHAT, {"response_format": {"type": "json_object"}}),
    ("/v1/completions", {"structured_outputs": {"regex": "a+"}}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}),
    ("/v1/completions", {"prompt_logprobs": 5, "logprobs": 5, "n": 4, "temperature": 1.0, "top_p": 0.9}),
    ("/v1/completions", {"stop": ["a"], "bad_words": ["b"], "logit_bias": {"5": 1}, "min_tokens": 2}),
    ("/v1/completions", {"repetition_penalty": 1.1, "stream": True, "top_k": 5, "min_p": 0.1}),
)


@dataclass
class Phase:
    """A class of requests, what became of them, and how the honest clients fared meanwhile."""

    kind: Kind
    begin: float = 0.0
    end: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    peak: int = 0  # bytes
    faults: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """The line in the report."""
        outcomes = Counter(one.outcome for one in self.sent)
        return {
            "class": self.kind.name,
            "sent": len(self.sent),
            "outcomes": dict(sorted(outcomes.items())),
            "slowest_s": max((one.seconds for one in self.sent), default=0.0),
            "peak_mib": self.peak >> 20,
            "honest": asdict(Delays.of(self.visits)),
            "faults": self.faults,
        }


class Siege:
    """A server, the watch over its memory and its honest clients; a context. `bodies` are the clients' chats."""

    def __init__(self, plan: Plan, scene: Scene, bodies: Sequence[Mapping[str, Any]], number: int) -> None:
        self.plan, self.scene, self.bodies = plan, scene, bodies
        self.phases: list[Phase] = []
        self.visits: list[Visit] = []  # from the end of the siege on
        self.faults: list[str] = []
        self.log, self._file = plan.out / f"server-{number}.log", plan.out / f"honest-{number}.jsonl"
        self._file.unlink(missing_ok=True)
        self._stack = ExitStack()

    def __enter__(self) -> Siege:
        with ExitStack() as stack:
            self.server = Server.start(self.plan.bundle, self.log, self.plan.options)
            stack.callback(self._reap)
            self.watch = stack.enter_context(Watch(self.server, self.plan.most_memory))
            self._first_uses()
            neighbours = Neighbours.started(
                self.server.url, self.bodies, self._file, self.plan.clients, self.plan.pause
            )
            self.neighbours = stack.enter_context(neighbours)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _reap(self) -> None:
        kill(self.server)
        if self.server.process is not None:
            self.server.process.wait()

    def _first_uses(self) -> None:
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            for path, fields in _FIRST_USES:
                asked = {"prompt": "a"} if path != CHAT else {"messages": [{"role": "user", "content": "a"}]}
                client.post(path, json={**asked, "max_tokens": 4, **fields})

    def calm(self, count: int) -> Delays:
        """Wait for `count` quiet answers; from then on memory, metrics and pages are compared with these."""
        if not self._answered(0.0, count, 60 + 10 * count):
            raise D2SDError("The server does not answer its honest clients.", where=self.log)
        found = asyncio.run(idle_pages(self.server, timeout=0))
        self._series = self._count_series()
        self._pages = self.server.metrics() | found
        self.start = self.server.resident_bytes()
        return Delays.of(self.neighbours.visits())

    def attack(self, kind: Kind, count: int) -> bool:
        """Send requests of a class. Returns whether the server still serves its honest clients afterwards."""
        plan = self.plan
        cases = [kind.case(plan.seed, number, self.scene) for number in range(count)]
        phase = Phase(kind, begin=time.monotonic())
        self.phases.append(phase)
        phase.sent = asyncio.run(send(self.server.url, kind, cases, plan.seed, self.scene, plan.timeout, plan.seconds))
        serves = self._answered(time.monotonic(), plan.clients, plan.timeout) and self._rests(plan.timeout)
        phase.end, phase.peak = time.monotonic(), self.watch.peak(phase.begin)
        phase.faults += verdicts.of_statuses(phase.sent)
        # a body of megabytes is kept only where its answer will be compared
        phase.sent = [one if one.answer else replace(one, case=Case()) for one in phase.sent]
        if self.watch.killed:
            phase.faults.append(f"{kind.name}: the server took {phase.peak >> 20} MiB and was killed")
        elif self._ended():
            phase.faults.append(f"{kind.name}: the server has ended")
        elif not serves:
            phase.faults.append(
                f"{kind.name}: it goes on, or no honest client is served, {plan.timeout:g} s after its end"
            )
        return serves and not self._ended()

    def end(self, sound: bool) -> None:
        """Stop the honest clients, and judge what the server leaves; with SIGTERM only if it is `sound`."""
        self.neighbours.stop()
        self.visits = self.neighbours.visits()
        if not sound:  # broken connections follow from what the class has been blamed for
            self.visits = [one for one in self.visits if not one.error or one.end < self.phases[-1].begin]
        else:
            pages = asyncio.run(idle_pages(self.server))
            after = self.server.metrics() | pages
            self.faults += verdicts.of_pages(self._pages, after)
            self.faults += verdicts.of_series(self._series, self._count_series(), _NEW_SERIES)
            self.at_end = self.server.resident_bytes()
            self.faults += verdicts.of_memory(self.start, self.watch.peak(), self.at_end, self.plan.growth)
            try:
                self.faults += verdicts.of_exit(self.server.stop(60))
            except subprocess.TimeoutExpired:
                self.faults.append("still there 60 s after SIGTERM")
        self.faults += verdicts.of_log(bad_lines(self.log))

    def memory(self) -> dict[str, Any]:
        """Memory of the server over time, in MiB."""
        samples = self.watch.samples[:: max(1, len(self.watch.samples) // 300)]
        return {
            "start": self.start >> 20,
            "peak": self.watch.peak() >> 20,
            "end": getattr(self, "at_end", 0) >> 20,
            "samples": [(round(at - samples[0][0], 1), size >> 20) for at, size in samples],
        }

    def _ended(self) -> bool:
        return self.server.process is None or self.server.process.poll() is not None

    def _answered(self, since: float, count: int, timeout: float) -> bool:
        """Wait for answers to `count` questions of honest clients that were asked after a moment."""
        last = time.monotonic() + timeout
        while self.neighbours.since(since) < count:
            if self._ended() or time.monotonic() > last:
                return False
            time.sleep(0.2)
        return True

    def _rests(self, timeout: float) -> bool:
        """Wait until the honest clients' requests are the only ones: what follows is not the fault of this class."""
        last = time.monotonic() + timeout
        while not self._ended() and time.monotonic() < last:
            with suppress(httpx.TransportError):  # a server that hangs or ends
                metrics = self.server.metrics()
                if metrics["d2sd_num_requests_running"] + metrics["d2sd_num_requests_waiting"] <= self.plan.clients:
                    return True
            time.sleep(0.1)
        return False

    def _count_series(self) -> int:
        return httpx.get(self.server.metrics_url, timeout=60).text.count("\n")
