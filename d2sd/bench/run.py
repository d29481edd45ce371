"""The cells of a benchmark, one after the other, each saved when it is done; then the result, its tables and plots."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
from pydantic import BaseModel

from d2sd.bench.measure import measure_cell
from d2sd.bench.plots import write_plots
from d2sd.bench.provenance import provenance
from d2sd.bench.result import Cell, Key, Result, ResultError, Settings, save
from d2sd.bench.tables import tables
from d2sd.convert.bundle.backends import BackendName
from d2sd.convert.bundle.serving import chat_request, make_engine
from d2sd.convert.validate.near_ties import top2_margin
from d2sd.errors import D2SDError
from d2sd.io import write_text
from d2sd.progress import bar
from d2sd.recipe import Policy
from d2sd.runtime.request import Request, SamplingParams
from d2sd.schema import read_model

if TYPE_CHECKING:
    from d2sd.bench.matrix import Matrix
    from d2sd.convert.bundle.load import Bundle
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.policy_selector import PolicySelector


class _Saved(BaseModel):
    """A measured cell, and the token ids of its answers."""

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
    _adaptive: dict[tuple[int, int], PolicySelector] = field(default_factory=dict)  # by rows and concurrency

    def all(self) -> None:
        """Measure what is missing, then write result.json, tables.md and the plots."""
        keys = self.matrix.keys()
        self._parts.mkdir(parents=True, exist_ok=True)
        with bar("cells", len(keys) * self.repeat) as advance:
            for turn in range(self.repeat):  # outermost: what slows the machine for a while slows every method
                for key in keys:
                    self._cell(key, turn)
                    advance(1)
        result = Result(
            provenance=provenance({"name": self.bundle.recipe.name, "manifest": self._mark}, self.device, self.backend),
            settings=self.settings,
            cells=[self._median(key) for key in keys],
        )
        save(result, self.out / "result.json")
        (self.out / "tables.md").write_text(tables(result) + "\n", "utf-8")
        for path in (self.out / "tables.md", *write_plots(result, self.out)):
            click.echo(path)
        wrong = sum(not one.excused for cell in result.cells for one in cell.differences)
        if wrong:
            raise D2SDError("speculation changed an answer", where=self.out, found=f"{wrong} differences beyond a tie")

    @property
    def _mark(self) -> str:
        """Identifies the bundle: its manifest holds the hash of every file."""
        text = self.bundle.manifest.model_dump_json()
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def _parts(self) -> Path:
        """Where finished cells wait: another bundle or setting has another folder, other prompts have another name."""
        inputs = f"{self._mark} {self.settings.model_dump_json()} {self.device} {self.backend}"
        return self.out / "parts" / hashlib.sha256(inputs.encode()).hexdigest()[:12]

    def _path(self, key: Key, turn: int) -> Path:
        prompts = hashlib.sha256(json.dumps(self.sets[key.set]).encode()).hexdigest()[:8]
        place = f"{key.set}@{prompts}-{key.temperature:g}-{key.concurrency}"
        return self._parts / f"{key.method}-{key.rows}-{place}-{turn}.json"

    def _saved(self, key: Key, turn: int = 0) -> tuple[Cell, list[list[int]]]:
        saved = read_model(_Saved, self._path(key, turn), error=ResultError, what="finished cell", fix="delete it")
        return saved.cell, saved.answers

    def _median(self, key: Key) -> Cell:
        """The turn of median time; what is counted is the same in all."""
        cells = sorted((self._saved(key, turn)[0] for turn in range(self.repeat)), key=lambda cell: cell.wall_seconds)
        return cells[(len(cells) - 1) // 2]

    def _cell(self, key: Key, turn: int) -> None:
        path = self._path(key, turn)
        if path.exists():
            return
        requests = self._requests(key)
        # The first cell of its set: plain decoding one by one, or as nearly so as was asked for.
        reference = Key("off", 1, key.set, key.temperature, min(self.matrix.concurrencies))
        plain = None if (key, turn) == (reference, 0) else self._saved(reference)[1]
        with bar(str(key), len(requests)) as advance:
            cell, answers = measure_cell(self._engine(key), key, requests, plain, self._gap, advance)
        write_text(path, json.dumps({"cell": cell.model_dump(mode="json"), "answers": answers}))

    def _engine(self, key: Key) -> Engine:
        """Made anew for every cell, so that all start from the same memory; step costs are measured once."""
        place = key.rows, key.concurrency
        engine = make_engine(
            self.bundle, policy=cast("Policy", key.method), row_budget=key.rows if key.rows > 1 else None,
            device=self.device, backend=self.backend, max_batch=key.concurrency,
            selector=self._adaptive.get(place) if key.method == "auto" else None,
        )  # fmt: skip
        if engine.selector is not None:
            self._adaptive[place] = engine.selector
        return engine

    def _requests(self, key: Key) -> list[tuple[str, Request]]:
        """The seed is the prompt's place: every method draws the same noise."""
        return [
            (name, chat_request(
                self.bundle, text, SamplingParams(key.temperature, seed=self.settings.seed + place),
                self.settings.max_new_tokens,
            ))
            for place, (name, text) in enumerate(self.sets[key.set])
        ]  # fmt: skip

    def _gap(self, request: Request) -> float:
        target = self.bundle.target.to(self.device)  # engines have moved its tables alone
        return top2_margin(target, list(request.prompt), request.sampling)
