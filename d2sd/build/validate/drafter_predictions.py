"""Predictions of drafters under several readings of their configs, on known answers.

The serving runner drafts after every token of the answers: one target pass for each set of layer ids, without decoding.
All readings are tested on the same tokens, so a few prompts are enough. The second drafter is run like the first, with
blocks of an anchor and masks: the shortest of its prefixes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.bundle.load import Bundle
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.plugins.trees import Branches
from d2sd.policies import DrafterRole
from d2sd.progress import Progress, silent
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence

# Shape letters: P positions (the tokens of the answers, and the steps that start before each), S = γ - 1 slots.


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One way to read a drafter's config; `layer_ids` as in `DrafterConfig.target_layer_ids`."""

    name: str
    layer_ids: tuple[int, ...]
    mask: int


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of a drafter under one reading."""

    lengths: Tensor  # [P] int64, tokens that the step would commit, bonus included
    hits: Tensor  # [P] int64, how many of the steps before it predicted the token, at most S

    @property
    def mean(self) -> float:
        """Tokens a step, over all positions. A served chain starts at only some of them: its tau differs slightly."""
        return round(float(self.lengths.double().mean()), 4)


def evaluate_configs(
    bundle: Bundle,
    drafters: Mapping[DrafterRole, Drafter],
    tried: Mapping[DrafterRole, SequenceOf[Hypothesis]],
    plain: SequenceOf[Sequence],
    progress: Progress = silent,
) -> dict[DrafterRole, dict[Hypothesis, Predictions]]:
    """Try every reading of every drafter on `plain`, finished requests of plain decoding.

    Readings with the same layer ids share one target pass.
    """
    found: dict[DrafterRole, dict[Hypothesis, Predictions]] = {role: {} for role in drafters}
    with progress("checking that the drafters fit", sum(map(len, tried.values()))) as advance:
        for ids in sorted({reading.layer_ids for some in tried.values() for reading in some}):
            asked = {role: [reading for reading in some if reading.layer_ids == ids] for role, some in tried.items()}
            readers = {role: _with_layer_ids(drafters[role], ids) for role, some in asked.items() if some}
            runner = _prefilled_runner(bundle, readers, plain)
            for role in readers:
                for reading in asked[role]:
                    found[role][reading] = _predictions(runner, role, reading.mask, plain, bundle)
                    advance(1)
    return found


def _with_layer_ids(drafter: Drafter, ids: tuple[int, ...]) -> Drafter:
    """The same weights with other target layer ids."""
    other = copy.copy(drafter)
    other.config = replace(drafter.config, target_layer_ids=ids)
    return other


def _prefilled_runner(
    bundle: Bundle, drafters: Mapping[DrafterRole, Drafter], plain: SequenceOf[Sequence]
) -> ModelRunner:
    """Make a runner with every text prefilled, one page per text, from page 1."""
    prepare_for_inference(bundle.target, drafters.values())
    runner = ModelRunner(bundle.target, drafters)
    runner.allocate(1 + len(plain), max(len(sequence.tokens) for sequence in plain))
    chunk = bundle.recipe.limits.prefill_chunk
    for page, sequence in enumerate(plain, 1):
        for start in range(0, len(sequence.tokens), chunk):
            tokens = torch.tensor(sequence.tokens[start : start + chunk])
            runner.prefill(tokens, [len(tokens)], torch.tensor([[page]]), torch.tensor([start]))
    runner.context.inject(drafters)
    return runner


def _predictions(
    runner: ModelRunner, role: DrafterRole, mask: int, plain: SequenceOf[Sequence], bundle: Bundle
) -> Predictions:
    """Draft before every token, in batches of the bundle's max_batch."""
    slots = runner.block_size - 1
    lengths, hits = [], []
    for page, sequence in enumerate(plain, 1):
        text = torch.tensor(sequence.tokens)
        anchors = torch.arange(len(sequence.request.prompt) - 1, len(text) - 1)
        parts = torch.split(anchors, bundle.recipe.limits.max_batch)
        best = torch.cat([_draft(runner, role, mask, page, text[part], part) for part in parts])
        guessed = anchors[:, None] + 1 + torch.arange(slots)  # [P, S], which token a slot predicts
        right = (best == F.pad(text, (0, slots), value=-1)[guessed]).long()  # no token is known after the text
        lengths.append(1 + right.cumprod(1).sum(1))
        of_token = torch.zeros(len(text) + slots, dtype=torch.long)
        hits.append(of_token.index_add_(0, guessed.flatten(), right.flatten())[anchors + 1])
    return Predictions(torch.cat(lengths), torch.cat(hits))


def _draft(runner: ModelRunner, role: DrafterRole, mask: int, page: int, anchor: Tensor, position: Tensor) -> Tensor:
    """The top-1 tokens [P, S] after `anchor [P]` at `position [P]` of one text."""
    count, slots = len(anchor), runner.block_size - 1
    sampling = Sampling.of([SamplingParams()] * count, runner.vocab_size, runner.device)
    batch = Batch(anchor, torch.full((count, 1), page), position, torch.ones(count, dtype=torch.bool), sampling)
    # Passed as kept prefix tokens, these masks replace the mask of the drafter's config.
    masks = torch.full((count, 1, slots), mask)
    kept = Branches(masks, torch.full((count, 1), slots), rejected=torch.full((count, 1), -1))
    return runner.draft_second(batch, kept, role, 1).top1[:, 0]
