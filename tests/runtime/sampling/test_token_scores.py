"""Scores of tokens, their biases and packed log-probabilities, against loops and sorts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from d2sd.modeling.where import tensors_of
from d2sd.runtime.batch import Batch
from d2sd.runtime.request import Request
from d2sd.runtime.sampling.bias import Entries, TokenBias
from d2sd.runtime.sampling.logprobs import pack_logprobs, unpack_logprobs
from d2sd.runtime.sampling.penalties import Text
from d2sd.runtime.sampling.sample import Sampling, token_scores
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from tests.runtime.helpers import STEADY

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
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={2: 5.0},
        bad_words_token_ids=((1,), (3, 4)),
        min_tokens=9,
    )
    texts = [Text([1, 2, 3], 1, frozenset({6})), Text([3, 3, 3, 3], 2, frozenset({6}))]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    sampling = Sampling.of([loud, SamplingParams()], VOCAB, "cpu", texts)
    for _ in range(3):
        scores = token_scores(logits, torch.tensor([3, 4]), sampling, None)
        assert torch.equal(scores[1], logits[1])
        assert not torch.equal(scores[0], logits[0])
        sampling = sampling.after(torch.tensor([3, 3]))


@STEADY
@given(st.lists(st.sampled_from([-math.inf, -3.0, 0.0, -0.0, 1.0, 2.5]), min_size=1, max_size=40), st.data())
def test_of_equal_tokens_the_smaller_comes_first(row: list[float], data: st.DataObject) -> None:
    """Whatever the batch and however many are asked for: what one request sees does not depend on another."""
    width, token = data.draw(st.integers(0, 20)), data.draw(st.integers(0, len(row) - 1))
    if max(row) == -math.inf:
        row[token] = 0.0
    logits = torch.tensor([row, [0.0] * len(row)])
    (found, _) = unpack_logprobs(pack_logprobs(logits, torch.tensor([token, 0]), width), [token, 0])
    ranked = sorted(range(len(row)), key=lambda t: (-row[t], t))[:width]
    logprobs = logits[0].log_softmax(-1)
    assert [t for t, _ in found.top] == ranked
    torch.testing.assert_close(torch.tensor([p for _, p in found.top]), logprobs[ranked])
    assert found.rank == 1 + sum(x > row[token] for x in row)


BIASED = 5
tokens = st.integers(0, BIASED - 1)
params_strategy = st.builds(
    SamplingParams,
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, 0.5, 2.0]), max_size=4),
    bad_words_token_ids=st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
    min_tokens=st.integers(0, 4),
)
texts_strategy = st.builds(
    lambda prompt, answer, stops: Text([*prompt, *answer], len(prompt), frozenset(stops)),
    st.lists(tokens, min_size=1, max_size=3),
    st.lists(tokens, max_size=4),
    st.lists(st.integers(-1, 9), max_size=3),
)


def changed(params: SamplingParams, text: Text, logits: list[float]) -> list[float]:
    """The logits of the token behind `text`, entry by entry."""
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for word in params.bad_words_token_ids:
        if len(word) - 1 <= len(text.tokens) and [*text.tokens, word[-1]][-len(word) :] == [*word]:
            logits[word[-1]] = -math.inf
    if len(text.tokens) < text.prompt_len + params.min_tokens:
        for token in text.stop_tokens & set(range(BIASED)):
            logits[token] = -math.inf
    return logits


@pytest.mark.slow
@STEADY
@given(st.lists(st.tuples(params_strategy, texts_strategy), min_size=1, max_size=4), st.data())
def test_every_row_has_its_own_entries_and_no_other(rows: list[tuple[SamplingParams, Text]], data: Any) -> None:
    """Also once some requests of the batch have left, and a token has been appended."""
    made = TokenBias.of([params for params, _ in rows], [text for _, text in rows], BIASED, "cpu")
    kept = [row for row in range(len(rows)) if data.draw(st.booleans())] or [0]
    new = data.draw(st.lists(tokens, min_size=len(kept), max_size=len(kept)))
    zeros = [0.0] * BIASED
    if made is None:
        assert all(changed(params, text, [*zeros]) == zeros for params, text in rows)
        return

    def found(table: TokenBias, texts: list[Text]) -> list[list[float]]:
        position = torch.tensor([len(text.tokens) for text in texts])
        values: list[list[float]] = table.apply(torch.zeros(len(texts), BIASED), position).tolist()
        return values

    assert found(made, [text for _, text in rows]) == [changed(params, text, [*zeros]) for params, text in rows]
    longer = [rows[row][1]._replace(tokens=[*rows[row][1].tokens, token]) for row, token in zip(kept, new, strict=True)]
    fewer = made.select(torch.tensor(kept)).after_token(torch.tensor(new))
    expected = [changed(rows[row][0], text, [*zeros]) for row, text in zip(kept, longer, strict=True)]
    assert found(fewer, longer) == expected


def test_the_table_is_as_large_as_what_it_holds() -> None:
    """Neither a long word nor another request makes an entry larger."""
    words = ((1,) * 1000, *((token, 2) for token in range(1000)))
    params = [SamplingParams(), SamplingParams(bad_words_token_ids=words, logit_bias={3: 1.0}), SamplingParams()]
    table = TokenBias.of(params, [Text([1, 2], 1)] * 3, 5000, "cpu")
    assert table is not None
    assert [len(x) for x in (table.row, *tensors_of(table.entries))] == [1002] * 6 + [999 + 1000] * 3
    assert table.tail.shape == (3, 999)


def test_the_entries_of_a_request_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = Sequence(0, Request((1, 2), 9, SamplingParams(logit_bias={1: 2.0}), frozenset({7, 3})), [1, 2])
    other = Sequence(1, Request((1, 2), 9, SamplingParams()), [1, 2])
    first = Batch.pack([sequence, other], 8, "cpu").sampling.bias
    monkeypatch.setattr(Entries, "of", None)
    sequence.tokens.append(3)
    second = Batch.pack([other, sequence], 8, "cpu").sampling.bias
    assert first is not None
    assert second is not None
    assert (first.row.tolist(), second.row.tolist()) == ([0], [1])
    assert other.bias is None


class Read(list[int]):
    """A text that says how many of its tokens were read together."""

    longest = 0

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            self.longest = max(self.longest, len(range(*key.indices(len(self)))))
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        self.longest = len(self)
        return super().__iter__()


def test_a_text_is_counted_once() -> None:
    """Requests join, leave and change places, and one is preempted. Each step reads what is new, and counts all."""
    dice = random.Random(3)
    kinds = [SamplingParams(repetition_penalty=1.5), SamplingParams(frequency_penalty=0.5), SamplingParams()]
    prompts = [tuple(dice.randrange(8) for _ in range(20)) for _ in range(6)]
    everybody = [Sequence(n, Request(p, 99, kinds[n % 3]), list(p)) for n, p in enumerate(prompts)]
    unread = dict.fromkeys(everybody, 20)
    for step in range(40):
        if step == 20:
            everybody[0].counts, unread[everybody[0]] = None, len(everybody[0].tokens)  # as the scheduler does
        sequences = dice.sample(everybody, dice.randrange(1, 6))
        for one in sequences:
            new = [dice.randrange(8) for _ in range(dice.randrange(1, 4))]
            one.tokens = Read([*one.tokens, *new])
            unread[one] += len(new)
        found = Batch.pack(sequences, 8, "cpu").sampling.penalties
        counted = [one for one in sequences if one.request.sampling.has_penalty]
        assert (found is None) == (not counted)
        for one in counted:
            assert found is not None
            assert isinstance(one.tokens, Read)
            assert one.tokens.longest == unread[one]
            unread[one] = 0
            row, answer = sequences.index(one), one.answer
            assert found.seen[row].tolist() == [token in list(one.tokens) for token in range(8)]
            assert found.count[row].tolist() == [answer.count(token) for token in range(8)]
