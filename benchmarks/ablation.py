"""Compare objectives: which one trains the better first drafter, for chains and for trees?

Every variant trains on the same answers, blocks and steps, from the same start, that of the recipe. The slot terms of
the recipe (ce, kl, ...) are common to all; what varies is how slots weigh, and the block terms added. Then its steps
over held-out answers are played: a chain of each block, and trees of two sizes. A greedy answer does not depend on what
is drafted, so these are the steps that a runtime would take, without the target's passes.

    d2sd train RECIPE --out OUT --only answers
    python -m benchmarks.ablation RECIPE --out build/ablation

Finished variants are kept in OUT/variants; the table is written again after each: OUT/ablation.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from d2sd.bench.markdown import number, table
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.cli.report import Reporting
from d2sd.convert.kinds import KINDS
from d2sd.errors import D2SDError
from d2sd.io import digest, read_json, write_json
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.plugins.choice import WIDTH
from d2sd.plugins.trees import Draft, Source, accept, best_first_tree, from_chain, with_anchor
from d2sd.policies import DrafterRole
from d2sd.progress import bar
from d2sd.train.data.features import TrainingData, cache_features, device_features
from d2sd.train.data.packing import pack_blocks
from d2sd.train.dist import Dist
from d2sd.train.kinds import trained_kind
from d2sd.train.loop import Trainer
from d2sd.train.objectives.loss import Candidates
from d2sd.train.pipeline.models import load_start
from d2sd.train.pipeline.responses import ResponseGenerator
from d2sd.train_recipe import TrainRecipe, TrainSettings, load_train_recipe

# Shape letters: A anchors, one at each token of an answer, G block size γ, S = G - 1 slots, N nodes, V vocabulary.

#: Coefficients of arXiv 2606.11552.
FOCAL, CHAIN = 0.3, 40.0
REFERENCE = "decay"
#: name -> what differs from the recipe's objective without block terms.
VARIANTS: dict[str, dict[str, Any]] = {
    "uniform": {"slots": "uniform"},
    REFERENCE: {"slots": "decay"},
    "decay + focal": {"slots": "decay", "focal": FOCAL},
    "decay + chain": {"slots": "decay", "chain": CHAIN},
    "decay + focal + chain": {"slots": "decay", "focal": FOCAL, "chain": CHAIN},
    "D-PACE": {"slots": "dpace"},
    "D-PACE + focal + chain": {"slots": "dpace", "focal": FOCAL, "chain": CHAIN},
    "D-PACE + chain 8": {"slots": "dpace", "chain": 8.0},  # as large as its slot terms, which are sums over a block
}
#: name -> nodes of a step's tree; 0: the chain of a block.
TREES = {"chain": 0, "ddtree, 16 nodes": 16, "ddtree, 64 nodes": 64}
#: Tokens a step of held-out answers, by the name of the tree.
Played = dict[str, list[float]]


def data_of(recipe: TrainRecipe, bundle: Bundle, work: Path, dist: Dist) -> tuple[TrainingData, TrainingData]:
    """Held-out responses, and those to train on, of a work folder of `d2sd train`, as far as they are written."""
    answers = ResponseGenerator(recipe, bundle, work, dist, bar, click.echo).written()
    aux_layer_ids = recipe.shape.aux_layer_ids(bundle.target.config.body.num_layers)
    with bar("features", len(answers)) as advance:
        if recipe.data.features == "device":
            found = device_features(bundle.target, aux_layer_ids, answers, advance)
        else:
            found = cache_features(bundle.target, aux_layer_ids, answers, work / "features.bf16", advance)
    return found.split(recipe.data.held_out)


@torch.no_grad()
def played(drafter: DraftModel, target: Decoder, data: TrainingData, vocabulary: Tensor) -> Played:
    """Tokens a step of each answer of `data`, drafted over the ids `vocabulary [V]` (bool), by the name of the tree."""
    head, embedding = target.head.detach(), target.embedding.detach()
    candidates = Candidates.draw(head, vocabulary, 0, head.dtype, torch.Generator())
    size, kind = drafter.config.block_size, trained_kind(drafter.config.kind)
    found: Played = {name: [] for name in TREES}
    for sequence in data:  # type: ignore[attr-defined]  # by index, up to IndexError
        anchors = torch.arange(sequence.prompt_length - 1, len(sequence.tokens) - 1)
        packed = pack_blocks([sequence], [anchors], size).to(head.device)
        hidden = kind.hidden(drafter, embedding, packed, torch.ones_like(packed.tokens[..., 0]))[0, :, 1:]
        logits = candidates.head.logits(hidden.flatten(0, 1), None).log_softmax(-1)
        best = logits.view(*hidden.shape[:2], -1).topk(WIDTH)
        draft = Draft(candidates.ids[best.indices], best.values)
        text = packed.tokens[0].where(packed.inside[0], -1)  # behind the end of an answer nothing is right
        for name, nodes in TREES.items():
            found[name].append(len(anchors) / _steps(draft, text, nodes))
    return found


def _steps(draft: Draft, text: Tensor, nodes: int) -> int:
    """Steps over an answer, of which text [A, G] has each anchor and what follows it."""
    if nodes:
        tree = best_first_tree(text[:, 0], [Source(draft)], nodes)
    else:
        tree = from_chain(*with_anchor(text[:, 0], draft.top1, draft.confidence))
    size = text.shape[1]
    chosen = torch.cat([text, text.new_full((len(text), 1), -1)], 1).gather(1, tree.depth + 1)
    committed, place, steps = accept(tree, chosen, size).count.tolist(), 0, 0
    while place < len(text):
        place += committed[place]
        steps += 1
    return steps


@dataclass
class Ablation:
    """The common part of all variants."""

    recipe: TrainRecipe
    first: TrainSettings
    steps: int
    bundle: Bundle
    held_out: TrainingData
    data: TrainingData
    out: Path
    dist: Dist

    def played(self, name: str, seed: int) -> Played | None:
        """Read what a variant commits; None: it is not trained yet."""
        path = self._path(name, seed)
        return read_json(path, error=D2SDError) if path.is_file() else None

    def train(self, name: str, seed: int) -> None:
        """Train a variant, or go on with it, and play the held-out answers."""
        shape, target, settings = self.recipe.shape, self.bundle.target, self._settings(name, seed)
        if DrafterRole.FIRST in self.recipe.starts:
            drafter: DraftModel = load_start(self.recipe, DrafterRole.FIRST)
        else:
            drafter = trained_kind(shape.kind).start(shape, target, self.data, seed)
        KINDS[shape.kind].attach(drafter.to(self.dist.device), target)
        path = self._path(name, seed)
        with bar(f"{name}, seed {seed}", settings.steps) as advance:
            trainer = Trainer(target, drafter, self.data, settings, None, self.dist)
            trainer.run(self.out / "states" / path.stem, lambda step, said: advance(1))
        count = self.recipe.shape.draft_vocab_size or target.config.vocab_size
        path.parent.mkdir(parents=True, exist_ok=True)
        vocabulary = self.data.frequent(count, target.config.vocab_size)
        write_json(path, played(drafter, target, self.held_out, vocabulary))

    def _settings(self, name: str, seed: int) -> TrainSettings:
        plain = self.first.objective.model_copy(update={"focal": 0, "chain": 0})
        steps = {"steps": self.steps, "evaluate_every": self.steps, "save_every": self.steps}
        return self.first.model_copy(
            update={"objective": plain.model_copy(update=VARIANTS[name]), "seed": seed, **steps}
        )

    def _path(self, name: str, seed: int) -> Path:
        made_of = digest([self._settings(name, seed).model_dump(), self.data.digest, self.held_out.digest])
        return self.out / "variants" / f"{name.replace(' ', '')}-{seed}-{made_of[:12]}.json"


def report(found: Mapping[str, list[Played]]) -> str:
    """τ of every variant by tree: the mean over answers and seeds, the seeds' range, and the ratio at equal seeds."""
    columns = [("objective", list(found))]
    for tree in TREES:
        means = {name: [statistics.mean(seed[tree]) for seed in seeds] for name, seeds in found.items()}
        spans = [f"{min(own):.2f} to {max(own):.2f} ({len(own)})" for own in means.values()]
        columns += [(tree, [number(statistics.mean(own)) for own in means.values()]), ("seeds", spans)]
        if base := means.get(REFERENCE):
            ratios = [[one / other - 1 for one, other in zip(own, base, strict=False)] for own in means.values()]
            columns.append((f"over {REFERENCE}", [f"{statistics.mean(own):+.1%}" for own in ratios]))
    return table(columns)


@click.command(cls=Reporting)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--work", type=click.Path(path_type=Path), help="Work folder of d2sd train.  [default: training/<name>]")
@click.option("--steps", default=600, show_default=True, type=click.IntRange(1), help="Steps of every training.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--only", multiple=True, type=click.Choice(list(VARIANTS)), help="These alone.")
@click.option("--minutes", type=float, help="Begin no training after this time.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    recipe: Path, work: Path | None, steps: int, seeds: int, only: tuple[str, ...], minutes: float | None, out: Path
) -> None:
    """Train a first drafter with every objective for equal steps, and play chains and trees of each: ablation.md."""
    loaded = load_train_recipe(recipe)
    if loaded.first is None:
        raise D2SDError("needs a recipe that trains a first drafter", where=recipe)
    folder, began, dist = work or Path("training") / loaded.name, time.monotonic(), Dist.init()
    bundle = load_bundle(folder / "target", verify=False)
    bundle.target.to(dist.device)
    ablation = Ablation(loaded, loaded.first, steps, bundle, *data_of(loaded, bundle, folder, dist), out, dist)
    found: dict[str, list[Played]] = {}
    for seed in range(seeds):
        for name in only or VARIANTS:
            if ablation.played(name, seed) is None:
                if minutes is not None and time.monotonic() - began > 60 * minutes:
                    continue
                ablation.train(name, seed)
            said = ablation.played(name, seed)
            assert said is not None, "it was trained just now"
            found.setdefault(name, []).append(said)
            (out / "ablation.md").write_text(
                f"{report(found)}\n\n{steps} steps of {loaded.first.batch} sequences × {loaded.first.blocks} blocks; "
                f"{len(ablation.held_out)} held-out answers.\n",
                "utf-8",
            )
    click.echo(report(found) if found else "no training began in this time")


if __name__ == "__main__":
    main()
