"""A tiny target, what it answers, and drafters of it, that the training tests share."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.stats import mean_tau
from d2sd.train.data.draws import first_errors
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import pack_blocks
from d2sd.train.data.responses import Response
from d2sd.train.dflash import block_hidden, drafter_config, drafter_from_target
from d2sd.train_recipe import Geometry, SecondSettings
from tests.tiny import greedy_text, random_tokens, runner_of, tiny_decoder

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
    return responses_of(target(), count, prompt, length)


def responses_of(decoder: Decoder, count: int = 4, prompt: int = 5, length: int = 16) -> list[Response]:
    prompts = random_tokens(decoder, count, prompt, seed=3).tolist()
    return [Response(f"a{i}", ids, greedy_text(decoder, ids, length)) for i, ids in enumerate(prompts)]


def exact_features(answers: list[Response]) -> TrainingData:
    return features_of(target(), answers, TAPS)


def features_of(decoder: Decoder, answers: list[Response], layers: tuple[int, ...]) -> TrainingData:
    """In memory and in fp32: what remains of a difference is then an error, not bf16."""
    rows = []
    for answer in answers:
        out = decoder.full_pass(torch.tensor([answer.prompt_ids + answer.response_ids]), aux_layer_ids=layers)
        rows.append(torch.cat([out.features, out.hidden], -1)[0])
    return TrainingData(answers, len(layers), rows.__getitem__)


def share_of_blocks(decoder: Decoder, head: DraftModel, known: list[Response]) -> float:
    """Accepted drafts over drafted ones, served greedily; the last step of an answer is cut by its length."""
    runner = runner_of(*deepcopy((decoder, head)))
    policy = make_policy("chain", block_size=BLOCK, branches=1, row_budget=BLOCK)
    engine = Engine(runner, policy, Limits(max_batch=4, max_context=32, page_size=4, prefill_chunk=16))
    done = engine.generate(Request(tuple(one.prompt_ids), len(one.response_ids)) for one in known)
    assert [s.answer for s in done] == [one.response_ids for one in known]
    return (mean_tau(s.stats for s in done) - 1) / (BLOCK - 1)


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
