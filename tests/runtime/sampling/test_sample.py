"""The target's choice: filters against a slow loop, and rows that do not disturb each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d2sd.errors import RequestError
from d2sd.modeling.decoder import Decoder
from d2sd.plugins.choice.reference import gumbel
from d2sd.policies import PolicyName
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.stats import SequenceStats
from d2sd.runtime.thought import Markers
from tests.runtime.helpers import STEADY, choices, gumbel_scores
from tests.runtime.oracle import allowed, chi_square_p
from tests.tiny import full_logits, runner_of, tiny_decoder, tiny_drafter

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


@pytest.mark.slow
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
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", 100.0),
        ("top_p", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -1.0),
        ("top_k", -2),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_parameters_out_of_range(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.where == field


def test_parameters_at_the_ends_of_their_range() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=0, seed=0)
    SamplingParams(temperature=99.9, top_p=1e-9, top_k=10**9, seed=2**64 - 1)


SEEDS, VOCAB, PROMPT, BLOCK = 20_000, 16, 3, 4
#: What the engine writes is compared seed by seed, not as a distribution: fewer are enough.
ENGINE_SEEDS = 4_000
KINDS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7 top-p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
    "T=1.3 top-k 6": SamplingParams(temperature=1.3, top_k=6),
}


@cache
def target() -> Decoder:
    return tiny_decoder(layers=1, hidden=16, heads=2, kv_heads=1, vocab=VOCAB)


@cache
def logits() -> Tensor:
    """[V, V, 3, V]: behind the prompt, behind it and one token, behind it and two."""
    texts = torch.tensor([[PROMPT, a, b] for a, b in product(range(VOCAB), repeat=2)])
    return full_logits(target(), texts).view(VOCAB, VOCAB, 3, VOCAB)


def exact(kind: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every possible triple."""

    def behind(a: int, b: int, place: int) -> Iterator[tuple[int, float]]:
        yield from allowed(logits()[a, b, place].tolist(), kind).items()

    return {(a, b, c): p * q * r for a, p in behind(0, 0, 0) for b, q in behind(a, 0, 1) for c, r in behind(a, b, 2)}


@cache
def chosen(kind: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of `choose` for every seed, all seeds in one batch."""
    seeds = [SamplingParams(kind.temperature, kind.top_p, kind.top_k, seed) for seed in range(SEEDS)]
    sampling = Sampling.of(seeds, VOCAB, "cpu")
    zero = torch.zeros(SEEDS, dtype=torch.long)
    text = torch.stack([zero, zero, zero], dim=1)
    for place in range(3):
        rows = logits()[text[:, 0], text[:, 1], place][:, None]
        text[:, place] = choices(rows, zero[:, None], zero + place, 1, sampling)[:, 0]
    return tuple(map(tuple, text.tolist()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_first_three_tokens_are_distributed_exactly(kind: SamplingParams) -> None:
    probability, texts = exact(kind), chosen(kind)
    assert len(probability) > 100
    assert chi_square_p(Counter(texts), probability) > 1e-3
    for place in range(3):
        marginal: dict[tuple[int, ...], float] = {}
        for text, p in probability.items():
            marginal[text[place],] = marginal.get((text[place],), 0.0) + p
        assert chi_square_p(Counter((text[place],) for text in texts), marginal) > 1e-3


def test_the_test_would_notice() -> None:
    """A tenth of temperature, or one filter less, and 20,000 samples do not fit."""
    texts = Counter(chosen(KINDS["T=1"]))
    assert chi_square_p(texts, exact(SamplingParams(temperature=1.1))) < 1e-6
    texts = Counter(chosen(KINDS["T=0.7 top-p 0.95"]))
    assert chi_square_p(texts, exact(SamplingParams(temperature=0.7))) < 1e-6


def engine_of(policy: PolicyName) -> Engine:
    """Serves a thousand requests at once."""
    first = tiny_drafter(target().config, layers=1, block_size=BLOCK)
    second = tiny_drafter(target().config, layers=1, block_size=BLOCK, role="variable_prefix", seed=5)
    made = make_policy(policy, block_size=BLOCK, branches=2, row_budget=16)
    limits = Limits(max_batch=1024, max_context=4, page_size=4, prefill_chunk=1)
    return Engine(runner_of(deepcopy(target()), first, second), made, limits)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["off", "d2sd", "hybrid"])
def test_the_engine_writes_the_same_texts(policy: PolicyName) -> None:
    """A seed is a request of its own: with and without speculation its text is the one of the sample tested above."""
    kinds = list(KINDS.values())
    mixed = [kinds[seed % len(kinds)] for seed in range(ENGINE_SEEDS)]
    sequences = engine_of(policy).generate(
        Request((PROMPT,), 3, SamplingParams(k.temperature, k.top_p, k.top_k, seed)) for seed, k in enumerate(mixed)
    )
    different = [
        seed for seed, (s, k) in enumerate(zip(sequences, mixed, strict=True)) if tuple(s.answer) != chosen(k)[seed]
    ]
    assert different == []
    stats = SequenceStats.merged(s.stats for s in sequences)
    if policy != "off":
        assert sum(n for length, n in stats.accepted.items() if length > 1) > 400  # drafts did take part
        assert stats.accepted_branches.keys() == {0, 1, 2}


@pytest.mark.parametrize("policy", ["off", "d2sd"])
def test_a_thought_that_is_ended_keeps_the_distribution(policy: PolicyName) -> None:
    """A budget of one token: the second token ends the thought unless the first has, and the third is free."""
    end = int(logits()[0, 0, 0].argmax())  # many texts end it by themselves
    probability: dict[tuple[int, ...], float] = {}
    for a, p in allowed(logits()[0, 0, 0].tolist(), KINDS["T=1"]).items():
        second = allowed(logits()[a, 0, 1].tolist(), KINDS["T=1"]) if a == end else {end: 1.0}
        for b, q in second.items():
            for c, r in allowed(logits()[a, b, 2].tolist(), KINDS["T=1"]).items():
                probability[a, b, c] = p * q * r
    kinds = [SamplingParams(1.0, seed=seed, thinking_token_budget=1) for seed in range(ENGINE_SEEDS)]
    asked = [Request((PROMPT,), 3, kind, markers=Markers("", "", PROMPT, end)) for kind in kinds]
    texts = Counter(tuple(sequence.answer) for sequence in engine_of(policy).generate(asked))
    assert chi_square_p(texts, probability) > 1e-3
    assert 400 < sum(count for text, count in texts.items() if text[0] != end) < ENGINE_SEEDS - 400
