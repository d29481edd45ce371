"""The noise is the part of sampling that must never change: a seed means a text."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d2sd.plugins.choice import reference as noise
from d2sd.plugins.choice.reference import gumbel, gumbel_at, philox
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime import oracle
from tests.runtime.helpers import STEADY

# philox4x32-10 in Random123's tests/kat_vectors: counter, key, expected.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def run_philox(key: list[int], counter: list[int]) -> list[int]:
    k0, k1 = torch.tensor(key)
    c0, c1, c2, c3 = torch.tensor(counter)
    return [int(word) for word in philox((k0, k1), (c0, c1, c2, c3))]


def uniform(noise: Tensor) -> Tensor:
    """The number in (0, 1) that Gumbel noise was made of."""
    return (-(-noise.double()).exp()).exp()


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_values(counter: str, key: str, answer: str) -> None:
    assert run_philox(words(key), words(counter)) == words(answer)
    k, c = words(key), words(counter)
    assert list(oracle.philox((k[0], k[1]), (c[0], c[1], c[2], c[3]))) == words(answer)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, 2**63, 2**63 + 12345, 2**64 - 1])
def test_noise_of_seed_position_and_token(seed: int) -> None:
    """Seeds above 2^63 do not fit an int64; their bits do."""
    sampling = Sampling.of([SamplingParams(temperature=1.0, seed=seed)], 10, "cpu")
    made = gumbel(sampling.seed, torch.tensor([[0, 1, 70000]]), 10)
    assert made.shape == (1, 3, 10)
    assert made.dtype == torch.float32
    bits = [[oracle.noise_word(seed, position, token) for token in range(10)] for position in (0, 1, 70000)]
    torch.testing.assert_close(
        uniform(made[0]), (torch.tensor(bits, dtype=torch.float64) + 0.5) / 2**32, atol=2e-7, rtol=0
    )


def test_depends_on_nothing_else() -> None:
    """Neither on the company in the batch, nor on the order of calls, nor on the size of the vocabulary."""
    seeds, positions = torch.tensor([5, -7, 11]), torch.tensor([[3, 4], [9, 1], [4, 4]])
    together = gumbel(seeds, positions, 33)
    for b in (2, 0, 1):
        for d in (1, 0):
            alone = gumbel(seeds[b : b + 1], positions[b : b + 1, d : d + 1], 33)
            assert torch.equal(alone[0, 0], together[b, d])
    assert torch.equal(gumbel(seeds, positions, 7), together[..., :7])
    state = torch.get_rng_state()
    gumbel(seeds, positions, 33)
    assert torch.equal(torch.get_rng_state(), state)


@STEADY
@given(st.data(), st.integers(1, 3))
def test_single_tokens_have_the_same_noise(data: st.DataObject, batch: int) -> None:
    """Whatever the shape behind the batch; seeds of 64 bits, tokens at the end of the vocabulary."""
    shape = (batch, *data.draw(st.lists(st.integers(1, 3), max_size=3)))
    dice = random.Random(data.draw(st.integers(0, 10_000)))
    seeds = [dice.getrandbits(64) - 2**63 for _ in range(batch)]
    count = math.prod(shape)
    position = torch.tensor([dice.randrange(100_000) for _ in range(count)]).view(shape)
    token = torch.tensor([dice.randrange(37) for _ in range(count)]).view(shape)
    made = gumbel_at(torch.tensor(seeds), position, token)
    assert (made.shape, made.dtype) == (shape, torch.float32)
    whole = gumbel(torch.tensor(seeds), position.view(batch, -1), 37).gather(2, token.view(batch, -1, 1))
    assert torch.equal(made, whole.view(shape))


def test_the_oracle_computes_the_same_noise() -> None:
    made = gumbel(torch.tensor([-5]), torch.tensor([[3, 1000]]), 50)[0]
    words_ = [[oracle.noise_word(2**64 - 5, position, token) for token in range(50)] for position in (3, 1000)]
    slow = torch.tensor([[oracle.gumbel_of(word) for word in row] for row in words_])
    torch.testing.assert_close(made, slow, atol=1e-5, rtol=1e-5)


def test_seeds_positions_and_tokens_differ() -> None:
    made = gumbel(torch.arange(20), torch.arange(10).expand(20, 10), 50)
    assert len(set(made.flatten().tolist())) > 9900  # of 10000: nothing repeats but by rounding


def test_is_gumbel_distributed() -> None:
    made = gumbel(torch.arange(50), torch.arange(100).expand(50, 100), 200).double().flatten()
    count = made.numel()
    deviation = math.pi / math.sqrt(6)
    assert abs(made.mean().item() - 0.5772156649) < 5 * deviation / math.sqrt(count)
    assert abs(made.var().item() / deviation**2 - 1) < 0.01
    share = uniform(made).mul(100).long().bincount(minlength=100).double() / count
    assert share.sub(0.01).abs().max().item() < 5 * math.sqrt(0.01 / count)


def test_neighbours_are_independent() -> None:
    """Correlation of each number with the next seed's, position's and token's."""
    made = uniform(gumbel(torch.arange(60), torch.arange(60).expand(60, 60), 64)) - 0.5
    for axis in range(3):
        a, b = made.narrow(axis, 0, made.shape[axis] - 1), made.narrow(axis, 1, made.shape[axis] - 1)
        assert abs((a * b).mean().item() * 12) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("word", [0, 1, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFEFF, 0xFFFFFF00, 0xFFFFFFFF])
def test_every_word_gives_a_finite_number(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At +inf a token would be chosen whatever its logit is, and filtered tokens (-inf) would become NaN."""
    monkeypatch.setattr(noise, "philox", lambda key, counter: (torch.full_like(counter[0], word),) * 4)
    assert gumbel(torch.tensor([1]), torch.tensor([[1]]), 4).isfinite().all()
    assert gumbel_at(torch.tensor([1]), torch.tensor([[1]]), torch.tensor([[3]])).isfinite().all()
