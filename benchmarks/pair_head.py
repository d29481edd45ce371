"""Measures what scores behind parents are worth, at equal rows, with the drafters of one bundle.

    ladder       marginals: candidates scored alone · once a depth: behind the best candidate of the slot before, for
                 all branches · each path: behind their own parents; for trees of one pass and of two
    factors      head or none, one pass or two, copies of earlier text or none, and the policies that draft chains

All arms have the same drafters, prompts and seeds, and the answers must be equal. The bundle's calibration, which was
fitted with the heads, applies to none of them unless --calibrated. Measured cells are kept: an interrupted run goes on.

    python benchmarks/pair_head.py BUNDLE data/eval/gsm8k.jsonl data/eval/mbpp.jsonl --out build/pair-head
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import click

from d2sd.bench.bootstrap import tau_ratio
from d2sd.bench.markdown import number, table
from d2sd.bench.measure import measure_cell
from d2sd.bench.provenance import provenance
from d2sd.bench.result import Cell, Key, Result, Settings, save
from d2sd.bench.tables import provenance as told
from d2sd.bench.tables import span
from d2sd.bench.views import pool
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.io import read_json, write_json
from d2sd.modeling.drafters.dflash import DFlashModel
from d2sd.plugins.trees import Draft
from d2sd.policies import PolicyName
from d2sd.progress import bar
from d2sd.prompts import read_prompts
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams

# Shape letters: B requests, S slots, M candidates a slot.

MARGINALS, DEPTH, PATH = "marginals", "once a depth", "each path"
ROWS = (16, 32, 64)
TREES: tuple[PolicyName, ...] = ("ddtree", "hybrid")
CHAINS: tuple[PolicyName, ...] = ("chain", "reanchor", "d2sd")


class Arm(NamedTuple):
    """A way to draft."""

    scores: str
    policy: PolicyName
    rows: int
    lookup: bool = False

    def __str__(self) -> str:
        return f"{self.policy}{'+lookup' if self.lookup else ''}, {self.scores}"


LADDER = [Arm(scores, policy, rows) for policy in TREES for rows in ROWS for scores in (MARGINALS, DEPTH, PATH)]
FACTORS = [
    *(Arm(scores, policy, 64) for policy in CHAINS for scores in (MARGINALS, PATH)),
    *(Arm(scores, policy, 64, True) for policy in TREES for scores in (MARGINALS, PATH)),
]


@dataclass
class Study:
    """Settings common to all arms."""

    path: Path
    prompts: tuple[Path, ...]
    per_set: int
    tokens: int
    flight: int
    calibrated: bool
    device: str
    out: Path

    @cached_property
    def described(self) -> Bundle:
        return load_bundle(self.path)

    def loaded(self, arm: Arm) -> Bundle:
        """The bundle, whose drafters score as the arm says: engines repack weights, so it is loaded anew."""
        bundle = load_bundle(self.path, verify=False)
        for drafter in bundle.drafters.values():
            if isinstance(drafter, DFlashModel) and drafter.head is not None:
                if arm.scores == MARGINALS:
                    drafter.pool = 0
                elif arm.scores == DEPTH:
                    drafter.conditioned = MethodType(_shared, drafter)  # type: ignore[method-assign]
        return bundle

    def requests(self, file: Path, temperature: float) -> list[tuple[str, Request]]:
        """The prompts of a file, the same for all arms."""
        return [
            (name, chat_request(self.described, text, SamplingParams(temperature, seed=seed), self.tokens))
            for seed, (name, text) in enumerate(read_prompts(file)[: self.per_set])
        ]

    def engine(self, arm: Arm) -> Engine:
        """An engine of the arm, without a prefix cache, which would shorten no step."""
        return make_engine(
            self.loaded(arm),
            policy=arm.policy,
            row_budget=arm.rows,
            device=self.device,
            max_batch=self.flight,
            calibrated=self.calibrated,
            prefix_cache=False,
            lookup=arm.lookup,
        )

    def cells(self, arm: Arm, temperature: float) -> Iterator[Cell]:
        """The arm on every set."""
        engine: Engine | None = None
        for file in self.prompts:
            name = f"{arm}-{arm.rows}-{file.stem}-{temperature:g}".replace(" ", "-").replace(",", "")
            path = self.out / "cells" / f"{name}.json"
            if not path.is_file():
                engine = engine or self.engine(arm)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._measured(engine, arm, file, temperature).model_dump_json(), "utf-8")
            yield Cell.model_validate_json(path.read_text("utf-8"))

    def _measured(self, engine: Engine, arm: Arm, file: Path, temperature: float) -> Cell:
        requests = self.requests(file, temperature)
        answers = self.out / "answers" / f"{file.stem}-{temperature:g}.json"
        key = Key(str(arm), arm.rows, file.stem, temperature, self.flight)
        saved: Any = read_json(answers, error=D2SDError) if answers.is_file() else {}
        known = saved.get("answers")
        with bar(str(key), len(requests)) as advance:
            cell, found = measure_cell(engine, key, requests, known, lambda request: 0.0, advance)
        if known is None:
            answers.parent.mkdir(parents=True, exist_ok=True)
            write_json(answers, {"answers": found})
        return cell


def _shared(self: DFlashModel, draft: Draft, *more: Any) -> Draft:
    """`DFlashModel.conditioned`, of which all branches take the row of the walk."""
    found = DFlashModel.conditioned(self, draft, *more)
    return replace(found, behind=None)


def arm_table(cells: dict[tuple[Arm, float], list[Cell]], arms: list[Arm], temperature: float) -> str:
    """Tokens a step of arms, and the ratio to the marginals of the same policy and rows, by prompts in pairs."""
    pooled = {arm: pool(cells[arm, temperature]) for arm in arms}
    ratios = [tau_ratio(pooled[arm._replace(scores=MARGINALS)], pooled[arm]) for arm in arms]
    sets = [cell.set for cell in cells[arms[0], temperature]]
    columns = [("arm", [str(arm) for arm in arms]), ("rows", [str(arm.rows) for arm in arms])]
    columns += [(name, [number(cells[arm, temperature][i].tau) for arm in arms]) for i, name in enumerate(sets)]
    columns.append(("all prompts", [number(pooled[arm].tau) for arm in arms]))
    over = [f"{number(ratio.value, 3)} ({span(ratio.interval)})" if ratio else "–" for ratio in ratios]
    return table([*columns, ("over marginals", over)])


@click.command(cls=Reporting)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompts", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--per-set", default=16, show_default=True, help="Prompts of each file.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--flight", default=8, show_default=True, help="Requests at once.")
@click.option("--temperature", multiple=True, type=float, default=(0.0, 1.0), show_default=True)
@click.option(
    "--rows", multiple=True, type=click.Choice([str(rows) for rows in ROWS]), help="Of the ladder; all if none."
)
@click.option("--only", type=click.Choice(["ladder", "factors"]), help="One part; all if none.")
@click.option("--calibrated", is_flag=True, help="Apply the bundle's calibration in all arms.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    bundle: Path,
    prompts: tuple[Path, ...],
    per_set: int,
    max_new_tokens: int,
    flight: int,
    temperature: tuple[float, ...],
    rows: tuple[str, ...],
    only: str | None,
    calibrated: bool,
    device: str,
    out: Path,
) -> None:
    """Measure BUNDLE's drafters on files of PROMPTS; write pair_head.json and pair_head.md to --out."""
    study = Study(bundle, prompts, per_set, max_new_tokens, flight, calibrated, device, out)
    out.mkdir(parents=True, exist_ok=True)
    parts: list[str] = []
    cells: dict[tuple[Arm, float], list[Cell]] = {}
    wanted = {"ladder": [arm for arm in LADDER if not rows or str(arm.rows) in rows], "factors": FACTORS}
    for name, arms in wanted.items():
        if only not in (None, name):
            continue
        for at in temperature:
            cells |= {(arm, at): list(study.cells(arm, at)) for arm in arms}
            parts += [f"## {name.capitalize()}, temperature {at:g}", arm_table(cells, arms, at)]
    settings = Settings(
        per_set=per_set,
        max_new_tokens=max_new_tokens,
        block_size=study.described.recipe.tree.block_size,
        branches=study.described.recipe.tree.branches,
        seed=0,
    )
    measured = [cell for found in cells.values() for cell in found]
    if measured:
        said = provenance({"name": study.described.recipe.name}, device)
        result = Result(provenance=said, settings=settings, cells=measured)
        save(result, out / "pair_head.json")
        differing = sum(len(cell.differences) for cell in measured)
        answers = sum(len(cell.requests) for cell in measured)
        parts += [f"{differing} of {answers} answers differ between arms.", told(result)]
    text = "\n\n".join(parts) + "\n"
    (out / "pair_head.md").write_text(text, "utf-8")
    click.echo(text)


if __name__ == "__main__":
    main()
