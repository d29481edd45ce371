"""Run the cells of a benchmark and save each one; then write the result, its tables and plots."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import BaseModel

from d2sd.bench import views
from d2sd.bench.measure import measure_cell
from d2sd.bench.plots import write_plots
from d2sd.bench.provenance import provenance
from d2sd.bench.result import Cell, Key, Result, ResultError, Settings, load_result, save
from d2sd.bench.tables import tables
from d2sd.build.validate.near_ties import top2_margin
from d2sd.bundle.devices import BackendName
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.errors import D2SDError
from d2sd.io import claim, write_text
from d2sd.progress import bar
from d2sd.recipe import Method
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.schema import read_model

if TYPE_CHECKING:
    from d2sd.bench.matrix import Matrix
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.policy_selector import PolicySelector


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
            runs=views.runs(cells),
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
