"""Compares two targets on the same texts: perplexity on human-written prompts, and divergence on sampled answers.

Perplexity covers the prompts' own tokens; the prefix and suffix that all prompts share are the chat template's and are
excluded. Divergence is KL(first ‖ second) in nats after the tokens of answers that the first target sampled, as in
serving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.modeling.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids; the first `prompt` ids are the prompt."""

    ids: list[int]
    prompt: int


def compare_texts(
    first: Decoder, second: Decoder, texts: Sequence[Text], advance: Callable[[int], None]
) -> dict[str, Any]:
    """Figures of `second` against `first`; the interval of the perplexity's change is over tokens, 95 %."""
    prompts = [text.ids[: text.prompt] for text in texts]
    head, tail = common(prompts), common([prompt[::-1] for prompt in prompts])
    losses: list[Tensor] = []  # [2, tokens] each
    divergence: list[Tensor] = []
    equal: list[Tensor] = []
    for text in texts:
        logits = [_logits(target, text.ids) for target in (first, second)]
        start = max(head, 1) - 1
        words = slice(start, max(start, text.prompt - tail - 1))  # positions that predict a prompt token
        following = torch.tensor([*text.ids[1:], 0])
        losses.append(torch.stack([F.cross_entropy(x[words], following[words], reduction="none") for x in logits]))
        answered = [x[text.prompt - 1 : -1].log_softmax(-1) for x in logits]
        divergence.append((answered[0].exp() * (answered[0] - answered[1])).sum(-1))
        equal.append(answered[0].argmax(-1) == answered[1].argmax(-1))
        advance(1)
    figures = {
        "divergence": round(float(torch.cat(divergence).mean()), 5),
        "same_greedy_token": round(float(torch.cat(equal).double().mean()), 4),
        "answer_tokens": int(sum(map(len, equal))),
    }
    return figures | _perplexity(torch.cat(losses, dim=1).double())


@torch.inference_mode()
def _logits(target: Decoder, ids: Sequence[int]) -> Tensor:
    """Teacher-forced logits [T, V] after each of the T `ids`."""
    tokens = torch.tensor([list(ids)], device=target.embed_tokens.weight.device)
    return target.logits(target.full_pass(tokens).hidden)[0]


def _perplexity(loss: Tensor) -> dict[str, Any]:
    """`loss` [2, tokens] in nats. Empty if there are too few tokens for an interval."""
    change = loss[1] - loss[0]
    if len(change) < 2:
        return {}
    mean, error = float(change.mean()), 1.96 * float(change.std()) / len(change) ** 0.5
    return {
        "perplexity": [round(math.exp(float(x)), 4) for x in loss.mean(1)],
        "perplexity_change": round(math.expm1(mean), 4),
        "perplexity_change_95": [round(math.expm1(mean - error), 4), round(math.expm1(mean + error), 4)],
        "prompt_tokens": len(change),
    }


def common(texts: Sequence[Sequence[int]]) -> int:
    """Length of the prefix that all texts share; 0 for a single text."""
    if len(texts) < 2:
        return 0
    shortest = min(map(len, texts))
    return next((i for i in range(shortest) if len({text[i] for text in texts}) > 1), shortest)
