"""Run one cell: generate from its prompts, count every step, compare the responses with plain decoding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from d2sd.bench.result import Cell, Difference, Key, Response
from d2sd.build.validate.near_ties import TIE_TOLERANCE, first_mismatch
from d2sd.policies import DRAFTER_NAMES, DrafterName
from d2sd.runtime.decode import StepTrace
from d2sd.runtime.engine import Engine
from d2sd.runtime.observe import observe
from d2sd.runtime.request import Request
from d2sd.runtime.sequence import Sequence as Running
from d2sd.runtime.stats import SequenceStats, reliability_bins

#: Tokens of the warm-up, which runs every shape of a step once; its times are discarded.
_WARM_UP = 8

#: A request whose prompt extends to the first differing token -> margin of the two best logits there.
Gap = Callable[[Request], float]


@dataclass(slots=True)
class Counts:
    """Sums over the request-steps of a traced run."""

    accepted: dict[int, list[int]] = field(default_factory=dict)  # by sequence id
    nodes: int = 0
    merged: int = 0
    rescued: int = 0
    ranks: Counter[str] = field(default_factory=Counter)
    #: Predicted acceptance, and whether it was accepted.
    outcomes: dict[DrafterName, list[tuple[float, bool]]] = field(default_factory=dict)

    def add(self, trace: StepTrace) -> None:
        """Count one step."""
        for observation in observe(trace):
            self.accepted.setdefault(observation.sequence.id, []).append(observation.accepted)
            self.nodes += observation.nodes
            self.merged += observation.num_merged
            self.rescued += observation.rescued
            if trace.branches is not None:
                self.ranks["none" if observation.rank is None else str(observation.rank)] += 1
            for node in observation.judged:
                self.outcomes.setdefault(DRAFTER_NAMES[node.drafter], []).append((node.prob, node.accepted))


def measure_cell(
    engine: Engine,
    key: Key,
    requests: Sequence[tuple[str, Request]],
    plain: Sequence[list[int]] | None,
    gap: Gap,
    advance: Callable[[int], None] = lambda finished: None,
) -> tuple[Cell, list[list[int]]]:
    """Run `requests` (id and request) with `engine`, after a warm-up; also returns their responses.

    `plain` are plain decoding's responses; None if this cell is the reference itself. What is timed is what is served:
    where a step can be a CUDA graph, a trace would keep the next one from being launched ahead, so a second run of the
    same requests is traced. Elsewhere a step is read before the next one is launched, traced or not: one run is both,
    and the time for counting is left out.
    """
    asked = [request for _, request in requests]
    # The salt keeps the sample's prompt out of the prefix cache: it is computed when it is measured.
    warm_up = replace(asked[0], max_new_tokens=min(_WARM_UP, asked[0].max_new_tokens), cache_salt="warm-up")
    engine.warm_up()  # or kernels of a GPU would be compiled while they are measured
    engine.generate([warm_up] * min(2, key.concurrency))
    engine.clock.clear()
    apart, counts = engine.runner.capture is not None, Counts()
    timed, wall = _run(engine, asked, None if apart else counts, advance)
    times: dict[str, Any] = {
        "stage_seconds": dict(engine.clock.seconds),
        "steps": engine.clock.steps,
        "wall_seconds": wall,
    }
    answers, traced = [sequence.answer for sequence in timed], timed
    differences = [] if plain is None else _differences(asked, answers, plain, gap)
    if apart:
        traced, _ = _run(engine, [replace(request, cache_salt="traced") for request in asked], counts, advance)
        differences += _differences(asked, [sequence.answer for sequence in traced], answers, gap)
    totals = SequenceStats.merged(sequence.stats for sequence in timed)
    names, lengths = [name for name, _ in requests], [counts.accepted[sequence.id] for sequence in traced]
    cell = Cell(
        **key._asdict(),
        **times,
        requests=list(map(_response, names, timed, lengths)),
        policies=dict(totals.policies),
        verified_rows=totals.verified_nodes,
        traced_steps=sum(map(len, lengths)) if apart else 0,
        nodes=counts.nodes,
        merged=counts.merged,
        boundary_rank=dict(counts.ranks),
        rescued=counts.rescued,
        calibration={name: reliability_bins(outcomes) for name, outcomes in counts.outcomes.items()},
        differences=differences,
    )
    return cell, answers


def _run(
    engine: Engine, requests: Sequence[Request], counts: Counts | None, advance: Callable[[int], None]
) -> tuple[list[Running], float]:
    """The finished requests, and seconds. With `counts`, steps are traced, and the time between them is left out."""
    engine.record_trace = counts is not None
    engine.selector = engine.selector and engine.selector.fresh()  # what a run before it showed is not known yet
    sequences = [engine.submit(request) for request in requests]
    begun, between = time.perf_counter(), 0.0
    while engine.busy:
        outputs = engine.step()
        if counts is not None:
            ended = time.perf_counter()
            if outputs and engine.trace is not None:
                counts.add(engine.trace)
            advance(sum(output.finish is not None for output in outputs))
            between += time.perf_counter() - ended
    return sequences, time.perf_counter() - begun - between


def _response(name: str, sequence: Running, lengths: list[int]) -> Response:
    """In the order of steps, where they were traced; `auto` may have served others when it was timed."""
    served = sequence.stats.accepted
    accepted = lengths if Counter(lengths) == served else sorted(served.elements())
    return Response(id=name, accepted=accepted, tokens=len(sequence.answer))


def _differences(
    requests: Sequence[Request], answers: Sequence[list[int]], plain: Sequence[list[int]], gap: Gap
) -> list[Difference]:
    differences = []
    for i, (request, answer, expected) in enumerate(zip(requests, answers, plain, strict=True)):
        token = first_mismatch(answer, expected)
        if token is not None:
            distance = gap(replace(request, prompt=(*request.prompt, *expected[:token])))
            differences.append(Difference(request=i, token=token, gap=distance, excused=distance <= TIE_TOLERANCE))
    return differences
