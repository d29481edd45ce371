"""Run one cell: generate from its prompts, count every step, compare the responses with plain decoding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from d2sd.bench.result import Cell, Difference, Key, Response
from d2sd.build.validate.near_ties import TIE_TOLERANCE, first_mismatch
from d2sd.policies import DRAFTER_NAMES, DrafterName
from d2sd.runtime.decode import StepTrace
from d2sd.runtime.engine import Engine
from d2sd.runtime.observe import observe
from d2sd.runtime.request import Request
from d2sd.runtime.sequence import Sequence as Running
from d2sd.runtime.stats import reliability_bins

#: Tokens of the warm-up, which runs every shape of a step once; its times are discarded.
_WARM_UP = 8

#: A request whose prompt extends to the first differing token -> margin of the two best logits there.
Gap = Callable[[Request], float]


@dataclass(slots=True)
class Counts:
    """Sums over the request-steps of a cell."""

    accepted: dict[int, list[int]] = field(default_factory=dict)  # by sequence id
    policies: Counter[str] = field(default_factory=Counter)
    verified_rows: int = 0
    nodes: int = 0
    merged: int = 0
    rescued: int = 0
    ranks: Counter[str] = field(default_factory=Counter)
    outcomes: dict[DrafterName, list[tuple[float, bool]]] = field(
        default_factory=dict
    )  # predicted acceptance, accepted

    def add(self, trace: StepTrace) -> None:
        """Count one step."""
        for observation in observe(trace):
            self.accepted.setdefault(observation.sequence.id, []).append(observation.accepted)
            self.policies[str(trace.policy)] += 1
            self.verified_rows += trace.policy.num_nodes
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

    `plain` are plain decoding's responses; None if this cell is the reference itself. The measured time is that of
    the engine's steps, without the time for counting.
    """
    _, sample = requests[0]
    # The salt keeps the sample's prompt out of the prefix cache: it is computed when it is measured.
    warm_up = replace(sample, max_new_tokens=min(_WARM_UP, sample.max_new_tokens), cache_salt="warm-up")
    engine.warm_up()  # or kernels of a GPU would be compiled while they are measured
    engine.generate([warm_up] * min(2, key.concurrency))
    engine.clock.clear()
    engine.record_trace = True
    sequences = [engine.submit(request) for _, request in requests]
    counts, wall = Counts(), 0.0
    while engine.busy:
        start = time.perf_counter()
        outputs = engine.step()
        wall += time.perf_counter() - start
        if outputs and engine.trace is not None:
            counts.add(engine.trace)
        advance(sum(output.finish is not None for output in outputs))
    answers = [sequence.answer for sequence in sequences]
    cell = Cell(
        method=key.method,
        rows=key.rows,
        set=key.set,
        temperature=key.temperature,
        concurrency=key.concurrency,
        requests=[_response(name, sequence, counts) for (name, _), sequence in zip(requests, sequences, strict=True)],
        policies=dict(counts.policies),
        verified_rows=counts.verified_rows,
        nodes=counts.nodes,
        merged=counts.merged,
        boundary_rank=dict(counts.ranks),
        rescued=counts.rescued,
        calibration={name: reliability_bins(outcomes) for name, outcomes in counts.outcomes.items()},
        stage_seconds=dict(engine.clock.seconds),
        steps=engine.clock.steps,
        wall_seconds=wall,
        differences=[] if plain is None else _differences([request for _, request in requests], answers, plain, gap),
    )
    return cell, answers


def _response(name: str, sequence: Running, counts: Counts) -> Response:
    return Response(id=name, accepted=counts.accepted[sequence.id], tokens=len(sequence.answer))


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
