"""Compare ways to train a second drafter: what carries it, and how many layers it needs?

Every arm trains on the same answers, blocks and steps behind one first drafter, with one thing of the recipe's `second`
changed. What counts is what a restart gives: behind a rejection of the first drafter on held-out answers, with the
rejected token left out, how many tokens in a row are right. No text is generated, so an arm takes little more than its
training; `benchmarks.papers` plays whole answers with the drafter that is chosen.

    d2sd train RECIPE --out OUT --only answers       # a recipe with `ready_first` and `second`
    python -m benchmarks.second RECIPE --out build/second

Finished arms are kept in OUT/arms; the table is written again after each: OUT/second.md.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from benchmarks.ablation import data_of
from d2sd.bench.markdown import number, table
from d2sd.build.sources import obtained
from d2sd.bundle.load import load_bundle
from d2sd.cli.report import Reporting
from d2sd.convert.kinds import DFLASH, KINDS
from d2sd.errors import D2SDError
from d2sd.io import digest, read_json, write_json
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.progress import bar
from d2sd.train.data.draws import SeededOrder
from d2sd.train.data.features import TrainingData
from d2sd.train.dflash import second_drafter
from d2sd.train.dist import Dist
from d2sd.train.kinds import trained_kind
from d2sd.train.loop import Trainer
from d2sd.train.objectives.loss import Candidates, first_rejections
from d2sd.train.state import digest_of
from d2sd.train_recipe import SecondSettings, load_train_recipe

RECIPE = "as the recipe"
#: name -> what differs from the recipe's `second`; a number is times the recipe's.
ARMS: dict[str, dict[str, Any]] = {
    RECIPE: {},
    "visible prefixes alone (Eq. 6, 7)": {"on_rejection": 0.0, "on_correction": 0.0},
    "no corrections": {"on_correction": 0.0},
    "rejections alone": {"on_rejection": 1.0, "on_correction": 0.0},
    "rejected token not left out": {"mask_rejected": False},
    "four times the rate": {"learning_rate": 4.0},
    "decay in place of D-PACE": {"slots": "decay"},
    "from new weights": {"cold": True},
    "two layers": {"layers": 2},
    "one layer": {"layers": 1},
}
#: Held-out answers, and blocks of each, that are asked.
_ANSWERS, _BLOCKS = 256, 32


class Restarts(NamedTuple):
    """Drafts behind the rejections of held-out blocks."""

    tokens: float  # right in a row, mean over rejections
    at: list[float]  # the same by tokens that were right before the rejection, 0 to γ - 2


def settings_of(base: SecondSettings, changes: dict[str, Any], steps: int, seed: int) -> SecondSettings:
    """The recipe's settings with those of an arm, and others that all arms share."""
    update: dict[str, Any] = {"steps": steps, "seed": seed, "save_every": steps, "evaluate_every": steps}
    for key, value in changes.items():
        if key == "learning_rate":
            update[key] = base.learning_rate * value
        elif key == "slots":
            update["objective"] = base.objective.model_copy(update={"slots": value})
        elif key != "cold":
            update[key] = value
    return base.model_copy(update=update)


@torch.no_grad()
def restarts(
    first: Drafter, drafter: DraftModel, target: Decoder, data: TrainingData, settings: SecondSettings
) -> Restarts:
    """Ask a drafter behind every rejection of the first one in the same blocks of `data`, over frequent ids."""
    draws = SeededOrder(0, len(data), 1, Dist())
    head, embedding = target.head.detach(), target.embedding.detach()
    size, kind = drafter.config.block_size, trained_kind(drafter.config.kind)
    right, asked = torch.zeros(size), torch.zeros(size)
    for index in range(min(_ANSWERS, len(data))):
        packed = draws.blocks([data[index]], [index], _BLOCKS, size, "restarts")
        always = data.frequent(settings.frequent, target.config.vocab_size)
        always[packed.tokens[packed.inside]] = True
        packed = packed.to(head.device)
        candidates = Candidates.draw(head, always, 0, head.dtype, torch.Generator())
        errors, drafted = first_rejections(first, embedding, packed, candidates)
        hidden = kind.hidden(drafter, embedding, packed, errors.clamp(max=size - 1))
        slots = torch.arange(size, device=head.device)
        banned = torch.where(slots == errors[..., None], candidates.index[drafted][..., None], -1)
        guess = candidates.ids[candidates.head.logits(hidden.flatten(0, 2), banned.flatten()).argmax(-1)]
        same = (guess.view_as(packed.tokens) == packed.tokens) & packed.inside | (slots < errors[..., None])
        gained = same.long().cumprod(-1).sum(-1) - errors
        for error, tokens in zip(errors.flatten().tolist(), gained.flatten().tolist(), strict=True):
            if error < size:
                right[error] += tokens
                asked[error] += 1
    return Restarts(float(right.sum() / asked.sum()), (right / asked.clamp(min=1))[1:].tolist())


def report(found: dict[str, list[Restarts]]) -> str:
    """Tokens a restart of every arm, mean over seeds and their range, and the ratio to the recipe's at equal seeds."""
    base = [one.tokens for one in found[RECIPE]]
    means = [[one.tokens for one in arm] for arm in found.values()]
    ratios = [[own / other - 1 for own, other in zip(arm, base, strict=False)] for arm in means]
    return table(
        [
            ("second drafter", list(found)),
            ("tokens a restart", [number(statistics.mean(arm)) for arm in means]),
            ("seeds", [f"{min(arm):.3f} to {max(arm):.3f} ({len(arm)})" for arm in means]),
            ("against the recipe's", [f"{statistics.mean(each):+.1%}" for each in ratios]),
            *(
                (f"behind {slot}", [number(statistics.mean(one.at[slot] for one in arm)) for arm in found.values()])
                for slot in range(0, len(next(iter(found.values()))[0].at), 2)
            ),
        ]
    )


@click.command(cls=Reporting)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--work", type=click.Path(path_type=Path), help="Work folder of d2sd train.  [default: training/<name>]")
@click.option("--steps", default=600, show_default=True, help="Steps of every training.")
@click.option("--seeds", default=3, show_default=True)
@click.option(
    "--only", multiple=True, type=click.Choice(list(ARMS)), help=f"These besides {RECIPE!r}, which all are against."
)
@click.option("--minutes", type=float, help="Begin no training after this time.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    recipe: Path, work: Path | None, steps: int, seeds: int, only: tuple[str, ...], minutes: float | None, out: Path
) -> None:
    """Train a second drafter in every way for equal steps, and compare what their restarts give: second.md."""
    loaded = load_train_recipe(recipe)
    base, source = loaded.second, loaded.ready_first
    if source is None or base is None:
        raise D2SDError("needs a recipe with `ready_first` and `second`", where=recipe)
    folder, began, dist = work or Path("training") / loaded.name, time.monotonic(), Dist.init()
    bundle = load_bundle(folder / "target", verify=False)
    target = bundle.target.to(dist.device)
    held_out, data = data_of(loaded, bundle, folder, dist)
    first = DFLASH.load(obtained(loaded, source), torch.float32).to(dist.device)
    DFLASH.attach(first, target)
    out.joinpath("arms").mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Restarts]] = {}
    arms = {name: changes for name, changes in ARMS.items() if not only or name in (RECIPE, *only)}
    for seed in range(seeds):
        for name, changes in {**arms, "before training": {"steps": 0}}.items():
            settings = settings_of(base, changes, changes.get("steps", steps), seed)
            made_of = digest([name, settings.model_dump(), data.digest, held_out.digest, digest_of(first)])
            kept = out / "arms" / f"{name.replace(' ', '-').replace(',', '')}-{seed}-{made_of[:12]}.json"
            if not kept.is_file():
                if minutes is not None and time.monotonic() - began > 60 * minutes:
                    continue
                if changes.get("cold"):
                    drafter: DraftModel = trained_kind("dflash").start(loaded.shape, target, data, seed)
                else:
                    drafter = second_drafter(first, settings)
                KINDS[drafter.config.kind].attach(drafter.to(dist.device), target)
                trainer = Trainer(target, drafter, data, settings, first, dist)
                with bar(f"{name}, seed {seed}", settings.steps) as advance:
                    trainer.run(out / "states" / kept.stem, lambda step, said: advance(1))
                write_json(kept, restarts(first, drafter, target, held_out, settings)._asdict())
            said: Any = read_json(kept, error=D2SDError)
            found.setdefault(name, []).append(Restarts(said["tokens"], said["at"]))
            (out / "second.md").write_text(
                f"{report(found)}\n\n{steps} steps of {base.batch} sequences each.\n", "utf-8"
            )
    click.echo(report(found) if found else "no training began in this time")


if __name__ == "__main__":
    main()
