"""A tiny target, what it answers, and drafters of it, that the training tests share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.train.data.draws import first_errors
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import pack_blocks
from d2sd.train.data.responses import Response
from d2sd.train.dflash import block_hidden, drafter_config, drafter_from_target
from d2sd.train_recipe import Geometry, SecondSettings
from tests.tiny import greedy_text, random_tokens, tiny_decoder

TAPS = (0, 1)
BLOCK = 4
MASK = 63
VOCAB = 64
GEOMETRY = Geometry(layers=1, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=list(TAPS))


class Killed(BaseException):
    """Ends a run from outside; no code of ours may catch it."""


@cache
def target() -> Decoder:
    return tiny_decoder()


@cache
def greedy_responses(count: int = 4, prompt: int = 5, length: int = 16) -> list[Response]:
    """Return the target's greedy answers to random prompts."""
    prompts = random_tokens(target(), count, prompt, seed=3).tolist()
    return [Response(f"a{i}", ids, greedy_text(target(), ids, length)) for i, ids in enumerate(prompts)]


def exact_features(answers: list[Response]) -> TrainingData:
    """In memory and in fp32: what remains of a difference is then an error, not bf16."""
    rows = []
    for answer in answers:
        out = target().full_pass(torch.tensor([answer.prompt_ids + answer.response_ids]), aux_layer_ids=TAPS)
        rows.append(torch.cat([out.features, out.hidden], -1)[0])
    return TrainingData(answers, len(TAPS), rows.__getitem__)


def new_drafter(prefix_base: float | None = None) -> Drafter:
    config = drafter_config(GEOMETRY, target().config)
    if prefix_base is not None:
        config = replace(config, role="variable_prefix", prefix_weight_base=prefix_base)
    data = exact_features(greedy_responses())
    sample = torch.cat([data[i].features[1:] for i in range(len(data))])
    return drafter_from_target(config, target(), sample, torch.Generator().manual_seed(0))


def settings(**changes: object) -> SecondSettings:
    """A training of a second or two, in fp32; `changes` replace keys."""
    quick = {
        "steps": 6,
        "batch": 2,
        "optimizer": "adamw",
        "blocks": 6,
        "learning_rate": 5e-3,
        "frequent": 8,
        "negatives": 8,
        "save_every": 2,
        "precision": "fp32",
        "objective": {"ce": 0.3, "kl": 0.7},
    }
    return SecondSettings.model_validate(quick | changes)


@torch.no_grad()
def greedy_tau(drafter: DraftModel, data: TrainingData, visible: int = 1) -> float:
    """Mean over greedy answers of tokens a step (bonus included): a walk along each, every block starting with
    `visible` real tokens. With one it is what a server of this drafter's chains would measure.
    """
    assert isinstance(drafter, Drafter)
    means = []
    for index in range(len(data)):
        sequence = data[index]
        anchors = torch.arange(sequence.prompt_length - 1, len(sequence.tokens) - 1)
        packed = pack_blocks([sequence], [anchors], BLOCK)
        shown = torch.full((1, len(anchors)), visible)
        said = target().logits(block_hidden(drafter, target().embed_tokens.weight, packed, shown)).argmax(-1)
        drafted = torch.where(torch.arange(BLOCK) < visible, packed.tokens, said)
        gains = first_errors(drafted[0], packed.tokens[0]).tolist()  # past the end it may be anything: the walk is over
        steps = place = 0
        while place < len(gains):
            place += gains[place]
            steps += 1
        means.append(len(gains) / steps)
    return sum(means) / len(means)


def noted(monkeypatch: pytest.MonkeyPatch, *kinds: type[Any]) -> list[tuple[Any, dict[str, Tensor]]]:
    """Trainers of these kinds as they are made, each with the weights that its drafter begins with."""
    made: list[tuple[Any, dict[str, Tensor]]] = []

    def note(kind: type[Any]) -> None:
        init = kind.__init__

        def begin(self: Any, *args: Any) -> None:
            init(self, *args)
            made.append(
                (self, {name: tensor.to("cpu", copy=True) for name, tensor in self.drafter.state_dict().items()})
            )

        monkeypatch.setattr(kind, "__init__", begin)

    for kind in kinds:
        note(kind)
    return made
