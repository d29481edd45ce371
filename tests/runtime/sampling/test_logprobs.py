"""Packed log-probabilities against a sort."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from d2sd.runtime.sampling.logprobs import pack_logprobs, unpack_logprobs
from tests.runtime.helpers import STEADY


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
