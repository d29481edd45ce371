"""The target's choice: filters against a slow loop, and rows that do not disturb each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d2sd.errors import RequestError
from d2sd.plugins.choice.reference import gumbel
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.helpers import STEADY, choices, gumbel_scores
from tests.runtime.oracle import allowed

GREEDY = SamplingParams()


def logits_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def scores_of(logits: Tensor, *params: SamplingParams, depth: Tensor | None = None) -> Tensor:
    """logits [B, T, V] at context lengths 10, 20, …"""
    batch, rows, vocab = logits.shape
    depth = torch.arange(rows).expand(batch, rows) if depth is None else depth
    context = 10 * torch.arange(1, batch + 1)
    return gumbel_scores(logits, depth, context, int(depth.max()) + 1, Sampling.of(params, vocab, "cpu"))


def kept(scores: Tensor) -> set[int]:
    return set(scores.isfinite().nonzero().flatten().tolist())


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.8, 0.95, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 16, 40]),
    seed=st.integers(0, 2**64 - 1),
)


@STEADY
@given(st.lists(params_strategy, min_size=1, max_size=3), st.integers(0, 10_000))
def test_filter_keeps_what_the_slow_loop_keeps(params: list[SamplingParams], seed: int) -> None:
    logits = logits_of(seed, len(params), 2, 16)
    scores = scores_of(logits, *params)
    for b, one in enumerate(params):
        for t in range(2):
            expected = allowed(logits[b, t].tolist(), one)
            assert kept(scores[b, t]) == set(expected)
            assert int(logits[b, t].argmax()) in kept(scores[b, t])


@STEADY
@given(params_strategy, st.integers(0, 10_000))
def test_score_is_log_probability_plus_noise(params: SamplingParams, seed: int) -> None:
    logits = logits_of(seed, 1, 1, 16)
    scores = scores_of(logits, params)[0, 0]
    probability = allowed(logits[0, 0].tolist(), params)
    number = params.seed or 0
    signed = number - 2**64 if number >= 2**63 else number
    noise = gumbel(torch.tensor([signed]), torch.tensor([[11]]), 16)[0, 0]
    best = max(probability, key=lambda t: probability[t])
    for token, p in probability.items():
        gap = math.log(p / probability[best]) + float(noise[token] - noise[best])
        assert float(scores[token] - scores[best]) == pytest.approx(gap, abs=1e-3)


def test_greedy_rows_stay_greedy_in_company() -> None:
    logits = logits_of(0, 3, 4, 32)
    hot = SamplingParams(temperature=1.5, top_k=3, top_p=0.9, seed=3)
    scores = scores_of(logits, GREEDY, hot, GREEDY)
    assert torch.equal(scores[0], logits[0])
    assert torch.equal(scores[2], logits[2])
    depth = torch.arange(4).expand(3, 4)
    chosen = choices(logits, depth, torch.zeros(3, dtype=torch.long), 4, Sampling.of([GREEDY, hot, GREEDY], 32, "cpu"))
    assert torch.equal(chosen[[0, 2]], logits[[0, 2]].argmax(-1))
    assert not torch.equal(chosen[1], logits[1].argmax(-1))


def test_all_greedy_is_argmax() -> None:
    logits = logits_of(1, 2, 3, 32)
    sampling = Sampling.of([GREEDY, SamplingParams(top_p=0.5, top_k=2, seed=9)], 32, "cpu")
    assert not sampling.any_sampled
    assert not sampling.any_filter
    depth = torch.zeros(2, 3, dtype=torch.long)
    assert torch.equal(choices(logits, depth, depth[:, 0], 1, sampling), logits.argmax(-1))


@STEADY
@given(st.lists(st.one_of(st.just(GREEDY), params_strategy), min_size=2, max_size=5), st.integers(0, 10_000))
def test_company_changes_nothing(params: list[SamplingParams], seed: int) -> None:
    logits = logits_of(seed, len(params), 2, 16)
    together = scores_of(logits, *params)
    for b, one in enumerate(params):
        context, depth = torch.tensor([10 * (b + 1)]), torch.tensor([[0, 1]])
        if one.temperature:
            alone = gumbel_scores(logits[b : b + 1], depth, context, 2, Sampling.of([one], 16, "cpu"))
            assert torch.equal(alone[0], together[b])
        chosen = choices(logits[b : b + 1], depth, context, 2, Sampling.of([one], 16, "cpu"))
        assert torch.equal(chosen[0], together[b].argmax(-1))


def test_company_that_filters_does_not_filter_others() -> None:
    """Next to a very likely token the others' mass drowns in the rounding of a sum; top-p 1 must keep them still."""
    logits = torch.zeros(2, 1, 16)
    logits[:, 0, 5] = 20.0
    free = SamplingParams(temperature=1.0, seed=1)
    alone = scores_of(logits[:1], free)
    together = scores_of(logits, free, SamplingParams(temperature=1.0, top_k=2, seed=2))
    assert len(kept(alone[0, 0])) == 16
    assert torch.equal(alone[0], together[0])


def test_rows_at_one_position_share_their_noise() -> None:
    logits = torch.zeros(1, 4, 32)
    depth = torch.tensor([[0, 1, 1, 2]])
    scores = scores_of(logits, SamplingParams(temperature=1.0, seed=4), depth=depth)[0]
    assert torch.equal(scores[1], scores[2])
    assert not torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[1], scores[3])


def test_position_is_context_and_depth() -> None:
    """The row at depth d stands at context_len + d and chooses the token behind it, however the two add up."""
    sampling = Sampling.of([SamplingParams(temperature=1.0, seed=4)], 32, "cpu")
    logits = torch.zeros(1, 1, 32)
    deep = gumbel_scores(logits, torch.tensor([[2]]), torch.tensor([5]), 3, sampling)
    late = gumbel_scores(logits, torch.tensor([[0]]), torch.tensor([7]), 1, sampling)
    assert torch.equal(deep, late)
    assert torch.equal(deep[0, 0], gumbel(torch.tensor([4]), torch.tensor([[8]]), 32)[0, 0])


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 1e-300}, {"temperature": 1e-4}])
@pytest.mark.parametrize("seed", [0, 290433])  # the second has a word of 24 ones at position 3
def test_narrowest_sampling_is_greedy(narrow: dict[str, float], seed: int) -> None:
    params = SamplingParams(**{"temperature": 1.0, "seed": seed, **narrow})  # type: ignore[arg-type]
    logits = logits_of(3, 1, 6, 64)
    chosen = choices(logits, torch.arange(6)[None], torch.tensor([0]), 6, Sampling.of([params], 64, "cpu"))
    assert torch.equal(chosen, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-39, 1e-45, 1e-300])
def test_almost_no_temperature_is_greedy(temperature: float) -> None:
    """Logits divided by it leave fp32."""
    params = [SamplingParams(temperature, seed=1), SamplingParams(temperature, top_p=0.9, seed=1)]
    logits = logits_of(3, 2, 4, 64) + 20
    chosen = choices(logits, torch.arange(4).expand(2, 4), torch.tensor([0, 0]), 4, Sampling.of(params, 64, "cpu"))
    assert torch.equal(chosen, logits.argmax(-1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan), ("temperature", -0.1), ("temperature", math.inf), ("temperature", 100.0),
        ("top_p", math.nan), ("top_p", 0.0), ("top_p", 1.01), ("top_p", -1.0),
        ("top_k", -2), ("seed", -1), ("seed", 2**64),
    ],
)  # fmt: skip
def test_parameters_out_of_range(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.where == field


def test_parameters_at_the_ends_of_their_range() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=0, seed=0)
    SamplingParams(temperature=99.9, top_p=1e-9, top_k=10**9, seed=2**64 - 1)
