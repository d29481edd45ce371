"""Copies of earlier text: the specification against loops, and the compiled library against the specification."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2sd.plugins.cpu import library
from d2sd.plugins.lookup import LENGTHS, SUPPORT, CopyScores, Text, find_copy
from d2sd.plugins.lookup.types import LONGEST
from d2sd.plugins.trees import Draft
from tests.runtime.helpers import STEADY

PAGE, NOWHERE = 4, 99


def text_of(texts: list[list[int]], dice: random.Random, spare: int = 0) -> Text:
    """Texts in shuffled pages, everything else in them a token that no text has; the last token is the anchor."""
    count = max((len(tokens) - 1) // PAGE + 1 for tokens in texts) + spare
    pages = torch.full((1 + len(texts) * count, PAGE), NOWHERE)
    numbers = list(range(1, len(pages)))
    dice.shuffle(numbers)
    table = torch.tensor(numbers).view(len(texts), count)
    for row, tokens in enumerate(texts):
        for place, token in enumerate(tokens[:-1]):
            pages[table[row, place // PAGE], place % PAGE] = token
    return Text(pages, table, torch.tensor([len(t) - 1 for t in texts]), torch.tensor([t[-1] for t in texts]))


def draft_of(dice: random.Random, *shape: int, vocabulary: int = 5) -> Draft:
    draw = torch.Generator().manual_seed(dice.getrandbits(32))
    logprob = -5 * torch.rand(shape, generator=draw)
    missing = torch.rand(shape, generator=draw) < 0.2
    return Draft(torch.randint(vocabulary, shape, generator=draw), logprob.masked_fill(missing, -math.inf))


def scores_of(slots: int) -> CopyScores:
    """All entries differ."""
    shape = 2, len(LENGTHS), len(SUPPORT) + 2, slots
    return CopyScores(-torch.randperm(math.prod(shape)).view(shape).float() / 1000 - 0.001)


def copied(text: list[int], slots: int) -> tuple[list[int], int]:
    """By loops: the continuation of the longest match, and its length."""
    best, at = 0, 0
    for place in range(len(text) - 1):
        length = 0
        while length < min(LONGEST, place + 1) and text[place - length] == text[len(text) - 1 - length]:
            length += 1
        if length and length >= best:
            best, at = length, place
    going = list(text)
    for slot in range(slots if best else 0):
        going.append(going[at + 1 + slot])
    return going[len(text) :] or [0] * slots, best


@STEADY
@given(
    seed=st.integers(0, 2**32), vocabulary=st.integers(1, 4), slots=st.integers(1, 5), longest=st.sampled_from([3, 40])
)
def test_copies_equal_loops(seed: int, vocabulary: int, slots: int, longest: int) -> None:
    dice = random.Random(seed)
    texts = [[dice.randrange(vocabulary) for _ in range(dice.randint(1, longest))] for _ in range(dice.randint(1, 3))]
    text, first, scores = (
        text_of(texts, dice, dice.randrange(3)),
        draft_of(dice, len(texts), slots, 2),
        scores_of(slots),
    )
    temperature = torch.tensor([dice.choice([0.0, 0.3, 0.8, 1.0, 2.0]) for _ in texts])
    copy = find_copy.reference(text, first, scores, temperature)
    for b, tokens in enumerate(texts):
        expected, matched = copied(tokens, slots)
        assert (copy.draft.tokens[b, :, 0].tolist(), int(copy.length[b])) == (expected, matched)
        for slot, token in enumerate(expected):
            known = max(first.logprob[b, slot].masked_fill(first.tokens[b, slot] != token, -math.inf).tolist())
            support = 0 if known == -math.inf else 1 + sum(known > bound for bound in SUPPORT)
            entry = max(0, sum(matched >= bound for bound in LENGTHS) - 1)
            greedy, sampled = scores.table[:, entry, support, slot].tolist()
            value = greedy + min(float(temperature[b]), 1.0) * (sampled - greedy) if matched else -math.inf
            assert float(copy.draft.logprob[b, slot, 0]) == pytest.approx(value, abs=1e-5)
    if library.available():
        compiled = find_copy.cpu(text, first, scores, temperature)
        assert compiled.draft.tokens.equal(copy.draft.tokens)
        assert compiled.length.equal(copy.length)
        assert compiled.draft.logprob.equal(copy.draft.logprob)
