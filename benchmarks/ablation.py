"""Compare objectives: which one trains the better first drafter?

Every variant trains on the same answers, blocks and steps, from the same start, and then drafts chains for the
evaluation prompts on the real runtime, greedily. The slot terms of the recipe (ce, kl, ...) are common to all; what
varies is how slots weigh, and the block terms added. Trainings resume, and finished cells are kept. The answers and
features are those of `d2sd train RECIPE`, which runs first.

    python benchmarks/ablation.py recipes/train/smollm2-135m.yaml --prompts data/eval --out build/ablation

It runs on a GPU if there is one. Each variant leaves variants/NAME.json when it ends: right tokens of its drafts on
held-out responses, and tokens a step. With --minutes none begins after that time, and with --per-set 0 nothing is
generated, so that a variant takes little more than its training.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from d2sd.bench import metrics
from d2sd.bench.bootstrap import tau_interval, tau_ratio
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
from d2sd.convert.kinds import KINDS
from d2sd.errors import D2SDError
from d2sd.io import write_json
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import DrafterRole
from d2sd.progress import bar
from d2sd.prompts import read_prompts
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.train.data.features import TrainingData, cache_features, device_features
from d2sd.train.dist import Dist
from d2sd.train.kinds import trained_kind
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import as_written
from d2sd.train.pipeline.responses import ResponseGenerator
from d2sd.train.rejections import mean_right
from d2sd.train_recipe import TrainRecipe, TrainSettings, load_train_recipe

SETS = ("gsm8k", "humaneval", "mbpp", "mt_bench")
#: Coefficients of arXiv 2606.11552.
FOCAL, CHAIN = 0.3, 40.0
#: name -> overrides of the recipe's objective.
VARIANTS: dict[str, dict[str, Any]] = {
    "uniform": {"slots": "uniform"},
    "decay": {"slots": "decay"},
    "decay + focal": {"slots": "decay", "focal": FOCAL},
    "decay + chain": {"slots": "decay", "chain": CHAIN},
    "decay + focal + chain": {"slots": "decay", "focal": FOCAL, "chain": CHAIN},
    "D-PACE": {"slots": "dpace"},
    "D-PACE + focal + chain": {"slots": "dpace", "focal": FOCAL, "chain": CHAIN},
    "D-PACE + chain 8": {"slots": "dpace", "chain": 8.0},  # as large as its slot terms, which are sums over a block
    "D-PACE, ce": {"slots": "dpace", "ce": 1.0, "kl": 0.0},
}
REFERENCE = "decay"


def data_of(recipe: TrainRecipe, bundle: Bundle, work: Path, dist: Dist) -> tuple[TrainingData, TrainingData]:
    """Held-out responses, and those to train on, of a work folder of `d2sd train`."""
    answers = ResponseGenerator(recipe, bundle, work, dist, bar, click.echo).all()
    aux_layer_ids = recipe.shape.aux_layer_ids(bundle.target.config.body.num_layers)
    with bar("features", len(answers)) as advance:
        if recipe.data.features == "device":
            found = device_features(bundle.target, aux_layer_ids, answers, advance)
        else:
            found = cache_features(bundle.target, aux_layer_ids, answers, work / "features.bf16", advance)
    return found.split(recipe.data.held_out)


@dataclass
class Ablation:
    """Settings common to all variants."""

    recipe: TrainRecipe
    work: Path
    prompts: Path
    per_set: int
    tokens: int
    steps: int
    out: Path
    dist: Dist

    @cached_property
    def bundle(self) -> Bundle:
        bundle = load_bundle(self.work / "target", verify=False)
        bundle.target.to(self.dist.device)
        return bundle

    @cached_property
    def parts(self) -> tuple[TrainingData, TrainingData]:
        return data_of(self.recipe, self.bundle, self.work, self.dist)

    @property
    def data(self) -> TrainingData:
        """The training data of the recipe."""
        return self.parts[1]

    def settings(self, name: str) -> TrainSettings:
        first = self.recipe.first
        assert first is not None, "main refuses such a recipe"
        plain = first.objective.model_copy(update={"focal": 0, "chain": 0})
        objective = plain.model_copy(update=VARIANTS[name])
        steps = {"steps": self.steps, "evaluate_every": self.steps, "save_every": max(100, self.steps // 4)}
        return first.model_copy(update={"objective": objective, **steps})

    def drafter(self, name: str) -> DraftModel:
        """The trained drafter, resumed from an earlier run if there is one."""
        settings, data = self.settings(name), self.data
        shape, target = self.recipe.shape, self.bundle.target
        start: DraftModel = trained_kind(shape.kind).start(shape, target, data, settings.seed)
        KINDS[shape.kind].attach(start.to(self.dist.device), target)
        trainer = Trainer(self.bundle.target, start, data, settings, None, self.dist)
        with bar(name, settings.steps) as advance:
            trainer.run(self.out / "states" / f"{_label(name)}-{self.steps}", lambda step, said: advance(1))
        return start

    def cells(self, name: str) -> list[Cell]:
        """A chain's, on every set."""
        began = time.monotonic()
        drafter = self.drafter(name)
        assert isinstance(drafter, Drafter)
        settings = self.settings(name)
        told: dict[str, object] = {
            "objective": settings.objective.terms | {"slots": settings.objective.slots},
            "steps": self.steps,
            "right tokens": mean_right(drafter, self.bundle.target, self.parts[0], settings),
            "seconds": round(time.monotonic() - began, 1),
        }
        summary = self.out / "variants" / f"{_label(name)}-{self.steps}.json"
        summary.parent.mkdir(parents=True, exist_ok=True)
        write_json(summary, told)
        found: list[Cell] = []
        for prompt_set in SETS if self.per_set else ():
            label = f"{_label(name)}-{self.steps}-{prompt_set}-{self.per_set}-{self.tokens}"
            path = self.out / "cells" / f"{label}.json"
            if not path.exists():
                cell = self._measured(name, prompt_set, drafter)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(cell.model_dump_json(), "utf-8")
            found.append(Cell.model_validate_json(path.read_text("utf-8")))
        if found:
            write_json(
                self.out / "variants" / f"{_label(name)}-{self.steps}.json", told | {"tau": metrics.mean_tau(found)}
            )
        click.echo(f"{name}: {told}")
        return found

    def _measured(self, name: str, prompt_set: str, drafter: DraftModel) -> Cell:
        dtype = self.bundle.target.embed_tokens.weight.dtype
        size = self.recipe.block_size
        bundle = replace(self.bundle, drafters={DrafterRole.FIRST: as_written(drafter, None, dtype)})
        flight = min(8 if self.dist.device == "cpu" else 64, self.per_set)
        asked = [
            (key, chat_request(bundle, text, SamplingParams(), self.tokens))
            for key, text in read_prompts(self.prompts / f"{prompt_set}.jsonl")[: self.per_set]
        ]
        longest = max(len(request.prompt) for _, request in asked) + self.tokens
        engine = make_engine(
            _with_context(bundle, longest), policy="chain", row_budget=size, device=self.dist.device, max_batch=flight
        )
        key = Key(name, size, prompt_set, 0.0, flight)
        with bar(f"{name} on {prompt_set}", len(asked)) as advance:
            return measure_cell(engine, key, asked, None, _not_asked, advance)[0]


def _label(name: str) -> str:
    """The name of a variant as a part of file names."""
    return name.replace(" ", "").replace(",", "-")


def _with_context(bundle: Bundle, tokens: int) -> Bundle:
    """The bundle with room for requests of so many tokens: the training's is as long as its answers."""
    recipe = bundle.recipe
    size = recipe.limits.page_size
    limits = recipe.limits.model_copy(update={"max_context": -(-tokens // size) * size})
    return replace(
        bundle, manifest=bundle.manifest.model_copy(update={"recipe": recipe.model_copy(update={"limits": limits})})
    )


def report(cells: dict[str, list[Cell]]) -> str:
    """τ of every variant by set, the mean with its interval, and the ratio to the reference on the same prompts."""
    reference = pool(cells[REFERENCE])
    ratios = {name: tau_ratio(reference, pool(found)) for name, found in cells.items()}
    columns = [("objective", list(cells))]
    columns += [(each, [number(found[i].tau) for found in cells.values()]) for i, each in enumerate(SETS)]
    columns.append(("mean", [number(metrics.mean_tau(found)) for found in cells.values()]))
    columns.append(("95 % interval", [span(tau_interval(found)) for found in cells.values()]))
    over = [f"{number(ratio.value)} ({span(ratio.interval)})" if ratio else "–" for ratio in ratios.values()]
    columns.append((f"over {REFERENCE}, all prompts", over))
    return table(columns)


def _not_asked(request: object) -> float:
    raise AssertionError("nothing is compared with plain decoding here")


@click.command(cls=Reporting)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--work", type=click.Path(path_type=Path), help="Work folder of d2sd train.  [default: training/<name>]")
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="Folder of the four JSONL sets.")
@click.option("--per-set", default=32, show_default=True, help="Prompts of each set.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--steps", default=600, show_default=True, help="Steps of every training.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(VARIANTS)), help="Train only these; the report needs all."
)
@click.option("--minutes", type=float, help="Begin no variant after this time.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    recipe: Path,
    work: Path | None,
    prompts: Path,
    per_set: int,
    max_new_tokens: int,
    steps: int,
    only: tuple[str, ...],
    minutes: float | None,
    out: Path,
) -> None:
    """Train a first drafter with every objective for equal steps, and write tau of each: ablation.md, .json."""
    loaded = load_train_recipe(recipe)
    if loaded.first is None:
        raise D2SDError("needs a recipe that trains a first drafter", where=recipe)
    folder, began = work or Path("training") / loaded.name, time.monotonic()
    ablation = Ablation(loaded, folder, prompts, per_set, max_new_tokens, steps, out, Dist.init())
    cells: dict[str, list[Cell]] = {}
    for name in only or VARIANTS:
        if minutes is None or time.monotonic() - began < 60 * minutes:
            cells[name] = ablation.cells(name)
    if len(cells) < len(VARIANTS) or not per_set:
        return
    result = Result(
        provenance=provenance({"name": loaded.name, "answers": ablation.data.digest[:16]}, ablation.dist.device),
        settings=Settings(
            per_set=per_set,
            max_new_tokens=max_new_tokens,
            block_size=loaded.block_size,
            branches=loaded.block_size - 1,
            seed=0,
        ),
        cells=[cell for found in cells.values() for cell in found],
    )
    save(result, out / "ablation.json")
    text = f"{report(cells)}\n\n{steps} steps each.\n\n{told(result)}\n"
    (out / "ablation.md").write_text(text, "utf-8")
    click.echo(text)


if __name__ == "__main__":
    main()
