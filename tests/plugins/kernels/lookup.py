"""The kernels of lookup against their specification: tokens and lengths to the bit, probabilities of the table."""

from __future__ import annotations

import random

import pytest
import torch

from d2sd.plugins import lookup
from d2sd.plugins.trees import Accepted
from tests.plugins.kernels.calls import there
from tests.plugins.lookup.test_lookup import NOWHERE, draft_of, scores_of, text_of
from tests.plugins.on_kernels import run_kernels

#: Slots, candidates, tokens of the vocabulary, of the longest text: short ones, one with matches of more than the most
#: that are counted, and several tiles.
SIZES = ((3, 2, 2, 21), (1, 1, 1, 19), (7, 3, 3, 40), pytest.param(15, 16, 2, 2100, marks=pytest.mark.slow))


@pytest.mark.parametrize(("slots", "width", "vocabulary", "longest"), SIZES)
def test_copy(slots: int, width: int, vocabulary: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts have one token, two, and more."""
    dice = random.Random(slots)
    texts = [[dice.randrange(vocabulary) for _ in range(n)] for n in (1, 2, longest, dice.randint(3, longest))]
    text, first, scores = (
        text_of(texts, dice, 5),
        draft_of(dice, 4, slots, width, vocabulary=vocabulary),
        scores_of(slots),
    )
    temperature = torch.tensor([0.0, 0.3, 0.7, 2.0])
    run_kernels(monkeypatch, "lookup", on=False)
    expected = lookup.find_copy(text, first, scores, temperature)
    run_kernels(monkeypatch, "lookup")
    found = lookup.find_copy(there(text), there(first), there(scores), there(temperature))
    assert found.length.cpu().equal(expected.length)
    assert found.draft.tokens.cpu().equal(expected.draft.tokens)
    torch.testing.assert_close(found.draft.logprob.cpu(), expected.draft.logprob, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 5])
def test_append(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across a page's end, past the page table, and of a request that is padding."""
    dice = random.Random(size)
    text = text_of([[7] * 6, [8] * 3, [9] * 3, [6] * 12], dice)
    tokens = torch.randint(50, (4, 9))
    path = torch.tensor([[0, *sorted(dice.sample(range(1, 9), size - 1))] for _ in range(4)])
    count, active = torch.tensor([size, 1, size, size]), torch.tensor([True, True, False, True])
    accepted, kernel = Accepted(path, count, path, count), there(text)
    run_kernels(monkeypatch, "lookup")
    lookup.append(kernel, there(tokens), there(accepted), there(active))
    run_kernels(monkeypatch, "lookup", on=False)
    lookup.append(text, tokens, accepted, active)
    assert kernel.pages[1:].cpu().equal(text.pages[1:])
    for row, length in ((0, size), (1, 1), (2, 0)):
        written, start = text.pages[text.page_table[row]].flatten(), int(text.context_len[row])
        assert written[start : start + length].tolist() == tokens[row, path[row, :length]].tolist()
        assert set(written[start + length :].tolist()) <= {NOWHERE}
