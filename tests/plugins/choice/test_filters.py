"""The radix select keeps what a sort of the vocabulary keeps: ties, infinities and extreme parameters included."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from d2sd.plugins.choice.cpu import argmax
from d2sd.plugins.choice.reference import apply_filters
from d2sd.plugins.cpu import library
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.helpers import STEADY

numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 20.0, -30.0, 1e30, -1e30, 1e-40, -math.inf]),
    st.floats(-40, 40, width=32),
)
filters = st.builds(
    SamplingParams,
    temperature=st.just(1.0),
    top_p=st.sampled_from([1e-300, 1e-6, 0.1, 0.5, 0.75, 0.9, 0.95, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 20, 10**6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


def by_sort(row: Tensor, params: SamplingParams) -> set[int]:
    """Tokens kept by a sort in exact numbers: a token stays while less than the limit is strictly better than it."""
    best = float(row.max())
    mass = [Fraction(int((row[t] - best).exp() * 2.0**40) + 1) for t in range(len(row))]
    ranked = sorted(range(len(row)), key=lambda t: -float(row[t]))
    if params.min_p:
        ranked = [t for t in ranked if row[t] >= best + torch.tensor(params.min_p).log()]
    if params.top_k:
        ranked = [t for t in ranked if sum(row[u] > row[t] for u in ranked) < params.top_k]
    if params.top_p < 1:
        limit = max(Fraction(float(torch.tensor(params.top_p))) * sum(mass[t] for t in ranked), Fraction(1))
        ranked = [t for t in ranked if sum(mass[u] for u in ranked if row[u] > row[t]) < limit]
    return {t for t in ranked if row[t] > -math.inf}


@pytest.mark.slow
@STEADY
@given(st.lists(filters, min_size=1, max_size=3), st.data())
def test_keeps_what_a_sort_keeps(params: list[SamplingParams], data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 12))
    row = st.lists(numbers, min_size=width, max_size=width).filter(lambda r: max(r) > -math.inf)
    logits = torch.tensor(data.draw(st.lists(row, min_size=len(params), max_size=len(params))))
    found = apply_filters(logits, Sampling.of(params, width, "cpu"))
    for b, one in enumerate(params):
        kept = set(found[b].isfinite().nonzero().flatten().tolist())
        assert kept == by_sort(logits[b], one)
        assert torch.equal(found[b][found[b] > -math.inf], logits[b][sorted(kept)])


@pytest.mark.parametrize("seed", range(4))
def test_a_large_vocabulary_keeps_what_a_sort_keeps(seed: int) -> None:
    """Sharp and flat rows, fp32 and rounded to bf16, which makes thousands of ties."""
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(seed)) * torch.tensor(
        [[8.0], [3], [1], [0.1]]
    )
    logits = logits.bfloat16().float() if seed % 2 else logits
    params = [SamplingParams(1.0, top_p=0.95 - 0.2 * seed, top_k=(0, 3000)[seed // 2])] * 4
    found = apply_filters(logits, Sampling.of(params, 5000, "cpu"))
    for row, values in zip(found, logits, strict=True):
        ranked = values.sort(descending=True).values
        if params[0].top_k:
            values = values.masked_fill(values < ranked[params[0].top_k - 1], -math.inf)
        mass = (((values - values.max()).exp() * 2.0**40).long() + 1).where(values > -math.inf, 0)
        order = values.argsort(descending=True)
        before = (mass[order].cumsum(0) - mass[order]).double() / mass.sum().double()
        least = values[order][before < torch.tensor(params[0].top_p).double()].min()
        assert torch.equal(row, values.masked_fill(values < least, -math.inf))


def test_filters_are_those_of_transformers() -> None:
    for case in range(200):
        check_filters(case)


def check_filters(case: int) -> None:
    """In vLLM's order: min-p, top-k, top-p."""
    dice = torch.Generator().manual_seed(case)
    logits = torch.randn(2, 50, generator=dice) * (0.5 + case % 7)
    top_p, min_p = (float(x) for x in torch.rand(2, generator=dice).clamp(0.02, 0.98))
    top_k = 1 + case % 30
    wanted = logits
    if case % 4 != 1:
        wanted = MinPLogitsWarper(0.3 * min_p)(None, wanted)
    if case % 4 != 2:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if case % 4 != 3:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    params = SamplingParams(
        1.0,
        top_p=top_p if case % 4 != 3 else 1.0,
        top_k=top_k if case % 4 != 2 else 0,
        min_p=0.3 * min_p if case % 4 != 1 else 0.0,
    )
    assert torch.equal(apply_filters(logits, Sampling.of([params] * 2, 50, "cpu")), wanted)


broken = st.one_of(numbers, st.sampled_from([math.inf, 3e38, -3e38]))


@STEADY
@given(st.lists(filters, min_size=2, max_size=4), st.data())
def test_no_row_touches_another(params: list[SamplingParams], data: st.DataObject) -> None:
    """Filters that a row does not use keep all of it, overflowed logits too. (A row with NaN has no token to keep.)"""
    width = data.draw(st.integers(1, 8))
    row = st.lists(broken, min_size=width, max_size=width)
    logits = torch.tensor(data.draw(st.lists(row, min_size=len(params), max_size=len(params))))
    together = apply_filters(logits, Sampling.of(params, width, "cpu"))
    for b, one in enumerate(params):
        alone = apply_filters(logits[b : b + 1], Sampling.of([one], width, "cpu"))[0]
        torch.testing.assert_close(together[b], alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1003])
def test_argmax_takes_the_first_of_equals_and_nan_first(size: int) -> None:
    logits = torch.randn(3, 4, size, generator=torch.Generator().manual_seed(size)).round(decimals=1)
    logits[0, 0] = float("-inf")
    logits[1, 1, size // 2 :] = float("nan")
    logits[2, 2, :] = -0.0
    logits[2, 2, size // 2] = 0.0
    assert torch.equal(argmax(logits), logits.argmax(-1))
    assert torch.equal(argmax(logits.transpose(0, 1)), logits.transpose(0, 1).argmax(-1))
