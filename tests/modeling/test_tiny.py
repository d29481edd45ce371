"""The tiny models must be worth testing with: text that wanders, and a clear winner at every step."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from d2sd.modeling.config import Family
from tests.tiny import full_logits, greedy_text, tiny_decoder


@pytest.mark.sampled(7)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", get_args(Family))
def test_greedy_text_is_neither_constant_nor_ambiguous(family: Family, tie: bool) -> None:
    decoder = tiny_decoder(family, tie=tie)
    prompt = [1, 2, 3]
    text = greedy_text(decoder, prompt, 64)
    logits = full_logits(decoder, torch.tensor([prompt + text]))[0, len(prompt) - 1 : -1]
    assert text == logits.argmax(-1).tolist()
    assert len(set(text)) >= 8
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-3  # rounding moves these logits by 1e-5


def test_seed_decides_the_weights() -> None:
    first, same, other = (tiny_decoder(seed=seed).embed_tokens.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
