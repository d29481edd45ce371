"""20,000 seeds against the exact distribution of the first three tokens, which a vocabulary of 16 lets us enumerate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.policies import PolicyName
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.stats import SequenceStats
from tests.runtime.helpers import choices
from tests.runtime.oracle import allowed, chi_square_p
from tests.tiny import full_logits, runner_of, tiny_decoder, tiny_drafter

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

    return {
        (a, b, c): p * q * r
        for a, p in behind(0, 0, 0)
        for b, q in behind(a, 0, 1)
        for c, r in behind(a, b, 2)
    }  # fmt: skip


@cache
def chosen(kind: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """What `choose` says for every seed, all seeds in one batch."""
    seeds = [SamplingParams(kind.temperature, kind.top_p, kind.top_k, seed) for seed in range(SEEDS)]
    sampling = Sampling.of(seeds, VOCAB, "cpu")
    zero = torch.zeros(SEEDS, dtype=torch.long)
    text = torch.stack([zero, zero, zero], dim=1)
    for place in range(3):
        rows = logits()[text[:, 0], text[:, 1], place][:, None]
        text[:, place] = choices(rows, zero[:, None], zero + place, 1, sampling)[:, 0]
    return tuple(map(tuple, text.tolist()))


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


@pytest.mark.parametrize("policy", ["off", "d2sd", "hybrid"])
def test_the_engine_writes_the_same_texts(policy: PolicyName) -> None:
    """A seed is a request of its own: with and without speculation its text is the one of the sample tested above."""
    kinds = list(KINDS.values())
    first = tiny_drafter(target().config, layers=1, block_size=BLOCK)
    second = tiny_drafter(target().config, layers=1, block_size=BLOCK, role="variable_prefix", seed=5)
    made = make_policy(policy, block_size=BLOCK, branches=2, row_budget=16)
    limits = Limits(max_batch=1024, max_context=4, page_size=4, prefill_chunk=1)
    engine = Engine(runner_of(deepcopy(target()), first, second), made, limits)
    mixed = [kinds[seed % len(kinds)] for seed in range(ENGINE_SEEDS)]
    sequences = engine.generate(
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
