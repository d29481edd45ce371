"""Time of a function on the device: as a CUDA graph, with caches flushed, median of many runs, in several rounds."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

Run = Callable[[], Any]
#: Rounds over all functions of a case: each is timed once per round, so that clock drift affects all equally.
ROUNDS = 3
#: Milliseconds of warm-up and of repetition of one timing.
WARM, REPEAT = 10, 50


def once(run: Run) -> tuple[float, bool]:
    """Median milliseconds, and whether it ran as a CUDA graph, as a server would run it; where it cannot be captured
    it is called, and the time holds what the host needs.
    """
    from triton.testing import do_bench  # type: ignore[import-untyped]

    try:
        replay, is_graph = captured(run)[0], True
    except Exception:
        torch.cuda.synchronize()
        replay, is_graph = run, False
    return float(do_bench(replay, warmup=WARM, rep=REPEAT, return_mode="median")), is_graph


def captured(run: Run) -> tuple[Run, Any]:
    """The same work as a CUDA graph: its replay, and the result of `run`, which every replay overwrites."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiled and allocated before the capture
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


class Times:
    """Times of the functions of one case."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.found: dict[str, list[float]] = {}
        self.graphs: dict[str, bool] = {}

    def add(self, name: str, run: Run) -> None:
        """Time a function in the first round."""
        self.runs[name] = run
        self._time(name)

    def again(self) -> None:
        """Run the other rounds, each in another order."""
        for number in range(1, ROUNDS):
            names = list(self.runs)
            for name in names[number:] + names[:number]:
                self._time(name)

    def figures(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"ms": median(found), "all_ms": found, "graph": self.graphs[name]}
            for name, found in self.found.items()
        }

    def _time(self, name: str) -> None:
        ms, is_graph = once(self.runs[name])
        self.graphs[name] = is_graph and self.graphs.get(
            name, True
        )  # in every round, else the time is not that of a graph
        self.found.setdefault(name, []).append(ms)
