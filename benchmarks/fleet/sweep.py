"""The sweep: fleets of growing size, each with and without a killed worker, and the routers."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from benchmarks.fleet.costs import StepCosts, WorkerModel
from benchmarks.fleet.load import Load
from benchmarks.fleet.outcome import FleetFigures, figures
from benchmarks.fleet.replayed import Check
from benchmarks.fleet.routing import RouterMode
from benchmarks.fleet.simulate import Fleet, Kill, Simulation
from benchmarks.fleet.worker import Stream
from d2sd.bench.latency import Slo
from d2sd.bench.result import Provenance
from d2sd.runtime.request import Limits

SLO = Slo(ttft=2.0, itl=0.25)
SECONDS, BEFORE, MINUTE = 240.0, 60.0, 60.0  # of load; until figures count, and until the kill; after the kill
PROMPT, ANSWER, SPREAD = 100, 64, 0.5
SHARE = 0.7  # of the rate at which plain decoding is saturated


class Cell(BaseModel):
    """A fleet with and without a killed worker, on the same requests."""

    policy: str
    workers: int
    rate: float  # requests a second of the whole fleet
    figures: FleetFigures  # after BEFORE
    minute: FleetFigures  # of the requests of the minute in which the other run has its kill
    killed: FleetFigures  # of that minute
    lost_tokens: int  # of context, computed by the killed worker: prefilled again for the streams that moved
    moved: int  # requests that lost their worker
    failed: int  # of these, the ones that no worker could take


class Routed(BaseModel):
    """Eight workers, prompts of eight groups that share 512 tokens each."""

    router: RouterMode
    figures: FleetFigures


class Results(BaseModel):
    """`fleet.json`; all but costs and checks is simulated."""

    provenance: Provenance
    costs: StepCosts
    checks: list[Check]
    limits: Limits
    cells: list[Cell]
    routers: list[Routed]


class Sweep:
    """Simulates fleets of one bundle's limits."""

    def __init__(self, costs: StepCosts, limits: Limits, pages: int) -> None:
        self.costs, self.limits, self.pages = costs, limits, pages

    def saturated(self, policy: str) -> float:
        """Requests a second of one worker that is always full."""
        load = self._load(requests=40 * self.limits.max_batch, concurrency=self.limits.max_batch)
        run = self._run(policy, load, Fleet(limits=self.limits, pages=self.pages))
        return load.requests / run[0].now

    def cell(self, policy: str, workers: int, rate: float) -> Cell:
        """One size of fleet."""
        load = self._load(requests=round(SECONDS * rate * workers), rate=rate * workers)
        fleet = Fleet(limits=self.limits, pages=self.pages, workers=workers)
        undisturbed = self._run(policy, load, fleet)
        killed = self._run(policy, load, fleet.model_copy(update={"kills": (Kill(BEFORE),)}))
        minute = BEFORE, BEFORE + MINUTE
        one, other = (figures(*run, SLO, minute) for run in (undisturbed, killed))
        streams = killed[1]
        return Cell(
            policy=policy, workers=workers, rate=load.rate or 0.0,
            figures=figures(*undisturbed, SLO, (BEFORE, SECONDS)),
            minute=one, killed=other, lost_tokens=sum(worker.totals.lost_tokens for worker in killed[0].workers),
            moved=sum(one.moves > 0 for one in streams), failed=sum(one.outcome == "failed" for one in streams),
        )  # fmt: skip

    def routed(self, router: RouterMode, rate: float) -> Routed:
        """Prompts that share prefixes; a worker's pages hold four requests, or the prefixes of five groups."""
        pages = 4 * self.limits.pages_for(704)
        load = self._load(
            requests=round(SECONDS * 8 * rate), rate=8 * rate, prompt_tokens=600, length_spread=0.05,
            shared_tokens=512, groups=8,
        )  # fmt: skip
        fleet = Fleet(limits=self.limits, pages=pages, workers=8, router=router)
        return Routed(router=router, figures=figures(*self._run("off", load, fleet), SLO, (BEFORE, SECONDS)))

    def _load(self, **changed: float) -> Load:
        lengths = {"prompt_tokens": PROMPT, "output_tokens": ANSWER, "length_spread": SPREAD}
        return Load.model_validate(lengths | changed)

    def _run(self, policy: str, load: Load, fleet: Fleet) -> tuple[Simulation, Sequence[Stream]]:
        model = WorkerModel(self.costs.engines[policy])
        streams, run = load.streams(model.profiles), Simulation(model, fleet)
        run.run(streams, load.concurrency)
        return run, streams
