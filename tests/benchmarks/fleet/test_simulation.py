"""The simulation against closed forms, against the engine, and what must hold in any run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.fleet.load import Load
from benchmarks.fleet.outcome import figures
from benchmarks.fleet.routing import ROUTER_MODES, RouterMode
from benchmarks.fleet.simulate import Fleet, Kill, Simulation
from benchmarks.fleet.worker import Stream, Worker
from d2sd.bench.latency import Slo
from d2sd.runtime.request import Limits
from d2sd.runtime.scheduler import Schedule, Scheduler
from tests.benchmarks.fleet.helpers import model
from tests.runtime.helpers import honest, make_engine, some_requests

LIMITS = Limits(max_batch=8, max_context=512, page_size=16, prefill_chunk=64)
TREE = [0.4, 0.3, 0.2, 0.1]
SLO = Slo(ttft=5.0, itl=1.0)


def run(load: Load, fleet: Fleet, **costs: object) -> tuple[Simulation, list[Stream]]:
    made = model(**costs)  # type: ignore[arg-type]
    streams, simulation = load.streams(made.profiles), Simulation(made, fleet)
    simulation.run(streams, load.concurrency)
    return simulation, streams


# -- closed forms ------------------------------------------------------------------------------------------------------


def one_by_one(load: Load) -> tuple[list[float], list[float], list[float]]:
    """Arrivals, services and waits of a worker that serves one request at a time, in seconds."""
    _, streams = run(load, Fleet(limits=replace(LIMITS, max_batch=1), pages=100), step=1.0, max_batch=1)
    waits = [one.chunks[0][0] - one.arrival - 1.0 for one in streams]
    return [one.arrival for one in streams], [float(one.max_tokens) for one in streams], waits


def test_every_wait_is_that_of_a_single_server_queue() -> None:
    """Lindley's recursion: W' = max(0, W + S - A)."""
    load = Load(requests=1_000, prompt_tokens=1, output_tokens=6, length_spread=0.9, rate=0.13, seed=3)
    arrivals, services, waits = one_by_one(load)
    expected = [0.0]
    for (before, now), service in zip(pairwise(arrivals), services, strict=False):
        expected.append(max(0.0, expected[-1] + service - (now - before)))
    assert waits == pytest.approx(expected, abs=1e-6)


def test_mean_wait_is_that_of_deterministic_service() -> None:
    """M/D/1: D ρ / (2 (1 - ρ)), here at ρ = 0.5, where a few thousand requests come near the mean."""
    _, _, waits = one_by_one(Load(requests=5_000, prompt_tokens=1, output_tokens=1, rate=0.5, seed=1))
    assert np.mean(waits) == pytest.approx(0.5, rel=0.1)


def test_a_full_batch_in_a_closed_loop_takes_the_sum_of_its_steps() -> None:
    load = Load(requests=24, prompt_tokens=17, output_tokens=10, concurrency=8)
    simulation, streams = run(load, Fleet(limits=replace(LIMITS, prefill_chunk=128), pages=100), step=0.5, prefill=0.01)
    # Three rounds of eight: one prefill of 8 · 16 tokens, and ten steps, the first one right after the prefill
    assert simulation.now == pytest.approx(3 * (128 * 0.01 + 10 * 0.5))
    assert all(one.chunks[0][0] - one.arrival == pytest.approx(1.28 + 0.5) for one in streams)


def test_speculation_takes_as_many_steps_as_its_mean_length_says() -> None:
    load = Load(requests=100, prompt_tokens=1, output_tokens=200, concurrency=4, seed=1)
    simulation, streams = run(load, Fleet(limits=LIMITS, pages=200), accepted=(TREE,))
    assert sum(len(one.chunks) for one in streams) == pytest.approx(100 * 200 / 2.0, rel=0.02)
    assert simulation.now == pytest.approx(100 * 200 / 2.0 / 4, rel=0.05)


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [None, 12])
def test_a_worker_takes_the_steps_of_the_engine(pages: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill chunks, decoding requests and pages in use, step by step; with 12 pages requests are preempted."""
    steps: list[tuple[list[int], int, int]] = []
    schedule = Scheduler.schedule

    def recorded(self: Scheduler) -> Schedule:
        made = schedule(self)
        steps.append(([count for _, count in made.prefill], len(made.decode), self.pages.used))
        return made

    monkeypatch.setattr(Scheduler, "schedule", recorded)
    engine = make_engine(honest(), "off", pages=pages, prefix_cache=False)
    sequences = engine.generate(some_requests()[:6])
    assert bool(pages) == bool(engine.stats.preemptions)
    expected, steps = [step for step in steps if step[0] or step[1]], []

    plain = [1.0] + [0.0] * (engine.runner.block_size - 1)
    worker = Worker(model(max_batch=4, accepted=[plain]), engine.limits, engine.memory.pages, max_waiting=100)
    for number, sequence in enumerate(sequences):
        worker.submit(Stream(number, 0.0, sequence.request.prompt, len(sequence.answer), 0, [0] * 100))
    while worker.begin_step() is not None:
        worker.end_step(0.0)
    assert [step for step in steps if step[0] or step[1]] == expected


# -- what holds in any run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ROUTER_MODES)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_once_and_no_token_is_lost(router: RouterMode, seed: int) -> None:
    """Few pages, a short queue, shared prefixes, and three kills."""
    load = Load(
        requests=150, prompt_tokens=60, output_tokens=30, length_spread=0.8, rate=2.0, shared_tokens=40, groups=3,
        seed=seed,
    )  # fmt: skip
    kills = (Kill(10.0), Kill(20.0, 1), Kill(21.0, 2))
    fleet = Fleet(
        limits=LIMITS, pages=14, workers=3, router=router, max_waiting=4, kills=kills, restart_seconds=15.0,
        migration_limit=1,
    )  # fmt: skip
    simulation, streams = run(load, fleet, step=0.3, prefill=0.002, accepted=(TREE, [1.0, 0.0, 0.0, 0.0]))
    assert {one.outcome for one in streams} == {"finished", "refused", "failed"}
    for one in streams:
        assert one.delivered == sum(count for _, count in one.chunks)
        assert (one.outcome == "finished") == (one.delivered == one.max_tokens)
        assert one.outcome != "refused" or (not one.chunks and not one.moves)
        assert one.outcome != "failed" or one.moves
        assert one.chunks == sorted(one.chunks)
    for worker in simulation.workers:
        assert not worker.streams
        assert worker.scheduler.pages.used == 0
        assert max(worker.totals.pages) <= 14
    counted = figures(simulation, streams, SLO, (0.0, 1e9))
    assert counted.requests == 150 == counted.finished + counted.refused + counted.failed
    assert counted.preemptions > 0
    assert counted.hit_rate > 0
    again = run(load, fleet, step=0.3, prefill=0.002, accepted=(TREE, [1.0, 0.0, 0.0, 0.0]))[1]
    assert [one.chunks for one in again] == [one.chunks for one in streams]


def test_a_stream_goes_on_with_the_same_text_after_its_worker_was_killed() -> None:
    load = Load(requests=40, prompt_tokens=30, output_tokens=50, rate=1.0, seed=4)
    fleet = Fleet(limits=LIMITS, pages=500, workers=2, restart_seconds=5.0)
    _, undisturbed = run(load, fleet, step=0.2, prefill=0.01, accepted=(TREE,))
    killed_fleet = fleet.model_copy(update={"kills": (Kill(10.05), Kill(18.0, 1))})
    simulation, killed = run(load, killed_fleet, step=0.2, prefill=0.01, accepted=(TREE,))
    moved = [one for one in killed if one.moves]
    assert len(moved) > 2
    # Accepted lengths are a function of the text: the interrupted step is taken again elsewhere, with the same result.
    assert [[k for _, k in one.chunks] for one in killed] == [[k for _, k in one.chunks] for one in undisturbed]
    once = sum(len(one.prompt) - 1 for one in killed)
    again = sum(worker.totals.prefill_tokens for worker in simulation.workers) - once
    assert 0 < again <= sum(worker.totals.lost_tokens for worker in simulation.workers)


def test_a_moved_stream_is_prefilled_with_its_answer_so_far() -> None:
    worker = Worker(model(step=0.5, prefill=0.01), LIMITS, 100, max_waiting=0)
    worker.submit(Stream(0, 0.0, (1,) * 30, 40, 0, [0] * 40, delivered=20))
    assert worker.begin_step() == pytest.approx(0.49 + 0.5)  # 49 tokens; the last one is the anchor
    assert worker.totals.prefill_tokens == 49
    for _ in range(20):
        finished = worker.end_step(1.0)
        worker.begin_step()
    assert [stream.delivered for stream in finished] == [40]


def test_a_lone_worker_that_is_killed_refuses_until_it_is_back() -> None:
    load = Load(requests=30, prompt_tokens=10, output_tokens=5, rate=1.0, seed=5)
    fleet = Fleet(limits=LIMITS, pages=100, kills=(Kill(10.0),), restart_seconds=5.0)
    _, streams = run(load, fleet, step=0.1)
    assert {one.id for one in streams if one.outcome == "refused"} == {
        one.id for one in streams if 10.0 <= one.arrival < 15.0
    }


def test_the_step_that_a_kill_interrupted_does_not_end_the_next_one() -> None:
    streams = [Stream(number, arrival, (1,), 1, 0, [0]) for number, arrival in enumerate((0.0, 7.0))]
    fleet = Fleet(limits=LIMITS, pages=100, kills=(Kill(5.0),), restart_seconds=1.0)
    Simulation(model(step=10.0), fleet).run(streams)
    assert streams[0].outcome == "failed"
    assert streams[1].chunks == [(17.0, 1)]


# -- routers -----------------------------------------------------------------------------------------------------------


def test_a_router_that_sees_prefixes_finds_more_of_them() -> None:
    load = Load(requests=200, prompt_tokens=100, output_tokens=5, rate=2.0, shared_tokens=96, groups=4, seed=1)
    rates = {}
    for router in ROUTER_MODES:
        fleet = Fleet(limits=LIMITS, pages=16, workers=4, router=router)
        simulation, streams = run(load, fleet, step=0.1, prefill=0.002)
        rates[router] = figures(simulation, streams, SLO, (0.0, 1e9)).hit_rate
    assert rates["kv"] > 0.8
    assert rates["kv"] > rates["round-robin"] + 0.1
    assert rates["kv"] > rates["least-loaded"] + 0.1


def test_least_loaded_evens_out_what_round_robin_does_not() -> None:
    load = Load(requests=200, prompt_tokens=1, output_tokens=40, length_spread=1.0, rate=2.0, seed=1)
    p99 = {}
    for router in ("round-robin", "least-loaded"):
        limits = replace(LIMITS, max_batch=1)
        simulation, streams = run(
            load, Fleet(limits=limits, pages=100, workers=10, router=router), step=0.1, max_batch=1
        )
        p99[router] = figures(simulation, streams, SLO, (0.0, 1e9)).ttft.p99
    assert p99["least-loaded"] < p99["round-robin"]
