"""Bias, bad words, min_tokens and penalties against transformers' logits processors and vLLM's formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from d2sd.runtime.sampling.penalties import Text
from d2sd.runtime.sampling.sample import Sampling, token_scores
from d2sd.runtime.sampling_params import SamplingParams

VOCAB = 12


class Case:
    """A random text over a small vocabulary, so that tokens and pairs repeat, and logits for its next token."""

    def __init__(self, seed: int) -> None:
        self.dice = torch.Generator().manual_seed(seed)
        length = self.draw(5, 15)  # transformers ignores a bad word that is longer than the text
        self.text = [self.draw(0, VOCAB) for _ in range(length)]
        self.prompt_len = self.draw(1, length)
        self.logits = torch.randn(1, VOCAB, generator=self.dice) * 4
        self.ids = torch.tensor([self.text])
        self.answer = self.text[self.prompt_len :]

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.dice))

    def scores(self, stop: frozenset[int] = frozenset(), **params: Any) -> Tensor:
        """Computed from the text at once and, which must be the same, from a part of it and tokens one by one."""
        position = torch.tensor([len(self.text)])
        found = []
        for known in (len(self.text), self.prompt_len, self.draw(self.prompt_len, len(self.text) + 1)):
            text = Text(self.text[:known], self.prompt_len, stop)
            sampling = Sampling.of([SamplingParams(**params)], VOCAB, "cpu", [text])
            for token in self.text[known:]:
                sampling = sampling.after(torch.tensor([token]))
            found.append(token_scores(self.logits, position, sampling, None))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        return found[0]


def on_200_cases(check: Callable[[int], None]) -> Callable[[], None]:
    """One test, because pytest takes longer for 200 of them than they take."""

    def test() -> None:
        for seed in range(200):
            check(seed)

    return test


@on_200_cases
def test_repetition_penalty_is_that_of_transformers(seed: int) -> None:
    case, penalty = Case(seed), (1.3, 0.6, 2.0)[seed % 3]
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(case.ids, case.logits.clone())
    torch.testing.assert_close(case.scores(repetition_penalty=penalty), wanted)


@on_200_cases
def test_presence_and_frequency_penalties_are_those_of_vllm(seed: int) -> None:
    """logits -= frequency · count; logits -= presence · (count > 0); counts in the answer alone."""
    case, presence, frequency = Case(seed), (0.5, 0.0, -1.2)[seed % 3], (0.7, -0.4)[seed % 2]
    wanted = case.logits.clone()
    for token in range(VOCAB):
        count = case.answer.count(token)
        wanted[0, token] -= frequency * count + presence * (count > 0)
    found = case.scores(presence_penalty=presence, frequency_penalty=frequency)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@on_200_cases
def test_bad_words_are_those_of_transformers(seed: int) -> None:
    """Random ones of one to four tokens, and one whose beginning ends the text."""
    case = Case(seed)
    words = [[case.draw(0, VOCAB) for _ in range(case.draw(1, 5))] for _ in range(4)]
    words.append([*case.text[-case.draw(1, 4) :], case.draw(0, VOCAB)])
    wanted = NoBadWordsLogitsProcessor(words, eos_token_id=None)(case.ids, case.logits.clone())
    found = case.scores(bad_words_token_ids=words)
    assert torch.equal(found, wanted)
    assert not found.isfinite().all()


@on_200_cases
def test_logit_bias_is_that_of_transformers(seed: int) -> None:
    case = Case(seed)
    bias = {case.draw(0, VOCAB): case.draw(-100, 101) / 10 for _ in range(3)}
    wanted = SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()})(case.ids, case.logits.clone())
    torch.testing.assert_close(case.scores(logit_bias=bias), wanted)


@on_200_cases
def test_min_tokens_is_that_of_transformers(seed: int) -> None:
    case, least = Case(seed), Case(seed + 1000).draw(0, 12)
    stop = [case.draw(0, VOCAB), case.draw(0, VOCAB)]
    wanted = MinNewTokensLengthLogitsProcessor(case.prompt_len, least, stop)(case.ids, case.logits.clone())
    assert torch.equal(case.scores(frozenset(stop), min_tokens=least), wanted)


def test_order_is_that_of_vllm() -> None:
    """Bias first, then the penalties of what it gave: a penalty divides where the bias has made a logit positive."""
    text = Text([3, 3, 5], 1)
    params = SamplingParams(
        logit_bias={3: 4.0, 5: -9.0}, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 5] = -1.0, 8.0
    scores = token_scores(logits, torch.tensor([3]), Sampling.of([params], VOCAB, "cpu", [text]), None)
    assert scores[0, 3] == (4.0 - 1.0) / 2 - 0.5 - 0.25
    assert scores[0, 5] == (8.0 - 9.0) * 2 - 0.5 - 0.25


def test_company_changes_no_bit() -> None:
    """Next to a request that uses everything, a plain one's logits pass through as they are."""
    loud = SamplingParams(
        repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0, logit_bias={2: 5.0},
        bad_words_token_ids=((1,), (3, 4)), min_tokens=9,
    )  # fmt: skip
    texts = [Text([1, 2, 3], 1, frozenset({6})), Text([3, 3, 3, 3], 2, frozenset({6}))]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    sampling = Sampling.of([loud, SamplingParams()], VOCAB, "cpu", texts)
    for _ in range(3):
        scores = token_scores(logits, torch.tensor([3, 4]), sampling, None)
        assert torch.equal(scores[1], logits[1])
        assert not torch.equal(scores[0], logits[0])
        sampling = sampling.after(torch.tensor([3, 3]))
