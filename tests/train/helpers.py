"""A tiny target, what it answers, and drafters of it, that the training tests share."""

from __future__ import annotations

from functools import cache

import torch

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafter import Drafter
from d2sd.train.answers import Answer
from d2sd.train.features import FeatureCache
from d2sd.train.initial import drafter_config, drafter_from_target
from d2sd.train_recipe import Geometry, TrainSettings
from tests.tiny import full_pass, greedy_text, random_tokens, tiny_decoder

TAPS = (0, 1)
BLOCK = 4
MASK = 63
GEOMETRY = Geometry(layers=1, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=list(TAPS))


@cache
def target() -> Decoder:
    return tiny_decoder()


@cache
def greedy_answers(count: int = 4, prompt: int = 5, length: int = 16) -> list[Answer]:
    """What the target says to random prompts."""
    prompts = random_tokens(target(), count, prompt, seed=3).tolist()
    return [Answer(f"a{i}", ids, greedy_text(target(), ids, length)) for i, ids in enumerate(prompts)]


def exact_features(answers: list[Answer]) -> FeatureCache:
    """A cache without a file, in fp32: what remains of a difference is then an error, not bf16."""
    rows = []
    for answer in answers:
        out = full_pass(target(), torch.tensor([answer.prompt_ids + answer.answer_ids]), taps=TAPS)
        rows.append(torch.cat([out.features, out.hidden], -1)[0])
    return FeatureCache(answers, torch.cat(rows), len(TAPS))


def new_drafter(prefix_base: float | None = None) -> Drafter:
    config = drafter_config(GEOMETRY, target().config, prefix_base)
    data = exact_features(greedy_answers())
    sample = torch.cat([data[i].features[1:] for i in range(len(data))])
    return drafter_from_target(config, target(), sample, torch.Generator().manual_seed(0))


def settings(**changes: object) -> TrainSettings:
    """A training of a second or two; `changes` replace keys."""
    quick = {"steps": 6, "batch": 2, "blocks": 6, "learning_rate": 5e-3, "negatives": 8, "save_every": 2}
    return TrainSettings.model_validate(quick | changes)
