"""The ragged table of biases: against loops over the entries, its size, and how often it is made."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2sd.runtime.batch import Batch
from d2sd.runtime.request import Request
from d2sd.runtime.sampling.bias import Entries, TokenBias
from d2sd.runtime.sampling.penalties import Text
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from tests.runtime.helpers import STEADY

VOCAB = 5
tokens = st.integers(0, VOCAB - 1)
params_strategy = st.builds(
    SamplingParams,
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, 0.5, 2.0]), max_size=4),
    bad_words_token_ids=st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
    min_tokens=st.integers(0, 4),
)
texts_strategy = st.builds(
    lambda prompt, answer, stops: Text([*prompt, *answer], len(prompt), frozenset(stops)),
    st.lists(tokens, min_size=1, max_size=3), st.lists(tokens, max_size=4), st.lists(st.integers(-1, 9), max_size=3),
)  # fmt: skip


def changed(params: SamplingParams, text: Text, logits: list[float]) -> list[float]:
    """The logits of the token behind `text`, entry by entry."""
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for word in params.bad_words_token_ids:
        if len(word) - 1 <= len(text.tokens) and [*text.tokens, word[-1]][-len(word) :] == [*word]:
            logits[word[-1]] = -math.inf
    if len(text.tokens) < text.prompt_len + params.min_tokens:
        for token in text.stop_tokens & set(range(VOCAB)):
            logits[token] = -math.inf
    return logits


@STEADY
@given(st.lists(st.tuples(params_strategy, texts_strategy), min_size=1, max_size=4), st.data())
def test_every_row_has_its_own_entries_and_no_other(rows: list[tuple[SamplingParams, Text]], data: Any) -> None:
    """Also once some requests of the batch have left, and a token has been appended."""
    made = TokenBias.of([params for params, _ in rows], [text for _, text in rows], VOCAB, "cpu")
    kept = [row for row in range(len(rows)) if data.draw(st.booleans())] or [0]
    new = data.draw(st.lists(tokens, min_size=len(kept), max_size=len(kept)))
    zeros = [0.0] * VOCAB
    if made is None:
        assert all(changed(params, text, [*zeros]) == zeros for params, text in rows)
        return

    def found(table: TokenBias, texts: list[Text]) -> list[list[float]]:
        position = torch.tensor([len(text.tokens) for text in texts])
        values: list[list[float]] = table.apply(torch.zeros(len(texts), VOCAB), position).tolist()
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
    assert [len(x) for x in (table.row, table.token, table.bias, table.until, table.length)] == [1002] * 5
    assert [len(x) for x in (table.before, table.entry, table.back)] == [999 + 1000] * 3
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
