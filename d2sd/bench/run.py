"""Run the cells of a benchmark and save each one; then write the result, its tables and plots."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from d2sd.bench import metrics
from d2sd.bench.plots import write_plots
from d2sd.bench.provenance import provenance
from d2sd.bench.result import Cell, Difference, Key, Response, Result, ResultError, Settings, load_result, save
from d2sd.bench.tables import tables
from d2sd.build.validate.checks import TIE_TOLERANCE, first_mismatch, top2_margin
from d2sd.bundle.devices import BackendName
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.errors import D2SDError
from d2sd.io import claim, write_text
from d2sd.policies import DRAFTER_NAMES, DrafterName
from d2sd.progress import bar
from d2sd.recipe import Method
from d2sd.runtime.decode import StepTrace
from d2sd.runtime.engine import Engine
from d2sd.runtime.observe import observe
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence as Running
from d2sd.runtime.stats import SequenceStats, reliability_bins
from d2sd.schema import read_model

if TYPE_CHECKING:
    from d2sd.bench.matrix import Matrix
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.policy_selector import PolicySelector

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


class _Saved(BaseModel):
    """A measured cell, and the token ids of its responses."""

    cell: Cell
    answers: list[list[int]]


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark of one bundle."""

    bundle: Bundle
    matrix: Matrix
    sets: dict[str, list[tuple[str, str]]]  # (id, text) by set
    settings: Settings
    repeat: int
    device: str
    backend: BackendName
    out: Path
    #: By method, rows and concurrency.
    _selectors: dict[tuple[str, int, int], PolicySelector] = field(default_factory=dict)

    def all(self) -> Iterator[Path]:
        """Measure the missing cells, then write result.json, tables.md and the plots; yields the last two's paths.

        Raises D2SDError at the end if a response differs from plain decoding's by more than a near-tie.
        """
        keys = self.matrix.keys()
        claim(self.out.resolve(), f"bench {self.bundle.recipe.name}")
        self._parts.mkdir(parents=True, exist_ok=True)
        with bar("cells", len(keys) * self.repeat) as advance:
            for repeat in range(self.repeat):  # outermost, so that a slow period of the machine affects every method
                for key in keys:
                    self._cell(key, repeat)
                    advance(1)
        repeats = [[self._saved(key, repeat)[0] for repeat in range(self.repeat)] for key in keys]
        # the one with the median time; the counts are the same in all
        cells = [sorted(some, key=lambda cell: cell.wall_seconds)[(len(some) - 1) // 2] for some in repeats]
        result = Result(
            provenance=provenance(_identity(self.bundle), self.device, self.backend),
            settings=self.settings,
            runs=metrics.runs(cells),
            cells=cells,
        )
        save(result, self.out / "result.json")
        write_text(self.out / "tables.md", tables(result) + "\n")
        yield self.out / "tables.md"
        yield from write_plots(result, self.out)
        wrong = sum(not difference.excused for cell in result.cells for difference in cell.differences)
        if wrong:
            raise D2SDError("speculation changed a response", where=self.out, found=f"{wrong} differences beyond a tie")

    @property
    def _parts(self) -> Path:
        """The folder of finished cells, by bundle and settings; the file name has the hash of the prompts."""
        inputs = f"{_fingerprint(self.bundle)} {self.settings.model_dump_json()} {self.device} {self.backend}"
        return self.out / "parts" / hashlib.sha256(inputs.encode()).hexdigest()[:12]

    def _path(self, key: Key, repeat: int) -> Path:
        prompts = hashlib.sha256(json.dumps(self.sets[key.set]).encode()).hexdigest()[:8]
        workload = f"{key.set}@{prompts}-{key.temperature:g}-{key.concurrency}"
        return self._parts / f"{key.method}-{key.rows}-{workload}-{repeat}.json"

    def _saved(self, key: Key, repeat: int = 0) -> tuple[Cell, list[list[int]]]:
        """A finished cell and its responses. Raises ResultError for a damaged file."""
        path = self._path(key, repeat)
        saved = read_model(_Saved, path, error=ResultError, what="finished cell", fix="delete it")
        return saved.cell, saved.answers

    def _cell(self, key: Key, repeat: int) -> None:
        path = self._path(key, repeat)
        if path.exists():
            return
        requests = self._requests(key)
        # The first cell of its set: plain decoding at the lowest concurrency.
        reference = Key("off", 1, key.set, key.temperature, min(self.matrix.concurrencies))
        plain = None if (key, repeat) == (reference, 0) else self._saved(reference)[1]
        gc.collect()  # the pools of the engine before, whose graphs may refer to each other: memory is for one engine
        with bar(str(key), len(requests)) as advance:
            cell, answers = measure_cell(self._engine(key), key, requests, plain, self._gap, advance)
        write_text(path, _Saved(cell=cell, answers=answers).model_dump_json())

    def _engine(self, key: Key) -> Engine:
        """A new engine for every cell, so that all start with empty pools and no experience; step costs are measured
        once.
        """
        shape = key.method, key.rows, key.concurrency
        engine = make_engine(
            self.bundle,
            policy=cast("Method", key.method),
            lookup=False,
            row_budget=key.rows if key.rows > 1 else None,
            device=self.device,
            backend=self.backend,
            max_batch=key.concurrency,
            selector=self._selectors.get(shape),
        )
        if engine.selector is not None:
            self._selectors[shape] = engine.selector
        return engine

    def _requests(self, key: Key) -> list[tuple[str, Request]]:
        """Requests by id. The seed is the prompt's index, so every method draws the same noise."""
        requests = []
        for seed, (name, text) in enumerate(self.sets[key.set], self.settings.seed):
            sampling = SamplingParams(key.temperature, seed=seed)
            requests.append((name, chat_request(self.bundle, text, sampling, self.settings.max_new_tokens)))
        return requests

    def _gap(self, request: Request) -> float:
        target = self.bundle.target.to(self.device)  # engines move only its embedding tables
        return top2_margin(target, list(request.prompt), request.sampling)


def own_folder(bundle: Bundle) -> Path:
    """Where results go by default. Raises ResultError if that of another bundle is there, or of another build of it."""
    folder = Path("build/bench") / bundle.path.resolve().name
    path, ours = folder / "result.json", _identity(bundle)
    if path.exists() and (found := load_result(path).provenance.bundle) != ours:
        raise ResultError(
            "This folder has the result of another bundle, or of this one before it was built again.",
            where=path,
            found=", ".join(found.values()),
            expected=", ".join(ours.values()),
            fix="name another folder with --out, or delete this one",
        )
    return folder


def _identity(bundle: Bundle) -> dict[str, str]:
    """The bundle in a result; the manifest has the hash of every file."""
    return {"name": bundle.recipe.name, "manifest": _fingerprint(bundle)}


def _fingerprint(bundle: Bundle) -> str:
    return hashlib.sha256(bundle.manifest.model_dump_json().encode()).hexdigest()[:16]
