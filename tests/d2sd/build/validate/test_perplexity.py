"""Perplexity and divergence against loops over one pass a token."""

from __future__ import annotations

import math

import pytest
import torch

from d2sd.build.validate.perplexity import Text, common, compare_texts
from d2sd.modeling.decoder import Decoder
from tests.tiny import full_logits, tiny_decoder

#: A template of 7 8 … 9, words of two or three tokens, an answer.
TEXTS = [Text([7, 8, 20, 21, 9, 30, 31, 32], 5), Text([7, 8, 22, 23, 24, 9, 33], 6), Text([7, 8, 25, 26, 9, 34, 35], 5)]


def distribution(target: Decoder, before: list[int]) -> list[float]:
    values: list[float] = full_logits(target, torch.tensor([before]))[0, -1].double().softmax(-1).tolist()
    return values


def test_against_one_pass_a_token() -> None:
    first, second = tiny_decoder(), tiny_decoder(seed=3)
    loss, divergence, equal, answers = [[], []], [], 0, 0  # type: ignore[var-annotated]
    for text in TEXTS:
        for place in range(2, len(text.ids)):
            p, q = (distribution(target, text.ids[:place]) for target in (first, second))
            if place < text.prompt - 1:
                loss[0].append(-math.log(p[text.ids[place]]))
                loss[1].append(-math.log(q[text.ids[place]]))
            elif place >= text.prompt:
                divergence.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
                equal += p.index(max(p)) == q.index(max(q))
                answers += 1
    advanced: list[int] = []
    found = compare_texts(first, second, TEXTS, advanced.append)
    assert len(advanced) == 3
    before, after = (math.exp(sum(x) / len(x)) for x in loss)
    assert found["perplexity"] == pytest.approx([before, after], rel=1e-4)
    assert found["perplexity_change"] == pytest.approx(after / before - 1, abs=2e-4)
    low, high = found["perplexity_change_95"]
    assert low < found["perplexity_change"] < high
    changes = [b - a for a, b in zip(*loss, strict=True)]
    mean = sum(changes) / 7
    error = 1.96 * (sum((c - mean) ** 2 for c in changes) / 6) ** 0.5 / 7**0.5
    assert [low, high] == pytest.approx([math.expm1(mean - error), math.expm1(mean + error)], abs=2e-4)
    assert (found["prompt_tokens"], found["answer_tokens"]) == (7, answers) == (7, 6)
    assert found["divergence"] == pytest.approx(sum(divergence) / answers, abs=1e-4)
    assert found["same_greedy_token"] == pytest.approx(equal / answers, abs=1e-4)


def test_a_target_against_itself() -> None:
    target = tiny_decoder()
    found = compare_texts(target, target, TEXTS, lambda _: None)
    assert (found["perplexity_change"], found["divergence"], found["same_greedy_token"]) == (0, 0, 1)


def test_prompts_without_words_have_no_perplexity() -> None:
    texts = [Text([7, 8, 30, 31], 2), Text([7, 8, 32, 33], 2)]
    found = compare_texts(tiny_decoder(), tiny_decoder(seed=3), texts, lambda _: None)
    assert "perplexity" not in found
    assert found["answer_tokens"] == 4


def test_what_all_begin_with() -> None:
    assert common([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert common([[1], [2]]) == 0
    assert common([[1, 2, 3]]) == 0
