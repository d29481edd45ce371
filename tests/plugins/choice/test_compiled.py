"""The largest logits of a row by the compiled library, against the specification and against sorting numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2sd.plugins.choice import candidates, cpu
from d2sd.plugins.choice.reference import likeliest
from d2sd.plugins.cpu import library
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.helpers import STEADY

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")


@STEADY
@given(
    st.lists(st.sampled_from([-math.inf, -3.0, -0.5, 0.0, 1.0, 1.5, 80.0]), min_size=1, max_size=300),
    st.integers(1, 64),
)
def test_the_largest_come_first_and_of_equals_the_first(row: list[float], count: int) -> None:
    count = min(count, len(row))
    pool, index, total = cpu.likeliest(torch.tensor([row]), count)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert index[0].tolist() == order
    most = max(row)
    if most == -math.inf:
        assert pool.isnan().all()
        assert total.isnan().all()
        return
    assert pool[0].tolist() == [row[i] for i in order]
    assert total.item() == pytest.approx(
        most + math.log(math.fsum(math.exp(x - most) for x in row)), rel=1e-6, abs=2e-6
    )


@pytest.mark.parametrize("size", [1, 15, 64, 65, 1000, 49152])
def test_rows_are_the_specifications_whatever_is_beside_them(size: int) -> None:
    """On one thread and on two, and each row alone: to the bit."""
    logits = 5 * torch.randn(2, 3, 7, size, generator=torch.Generator().manual_seed(size))
    count, threads = min(16, size), torch.get_num_threads()
    found = cpu.likeliest(logits, count)
    pool, index, total = likeliest(logits, count)
    assert torch.equal(found[0], pool)
    assert torch.equal(found[1], index)
    torch.testing.assert_close(found[2], total, rtol=1e-6, atol=1e-6)
    try:
        torch.set_num_threads(3 - min(threads, 2))
        again = cpu.likeliest(logits, count)
    finally:
        torch.set_num_threads(threads)
    alone = cpu.likeliest(logits[1:, 2:, 3:4].clone(), count)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert all(torch.equal(a[1:, 2:, 3:4], b) for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_proposes_nothing(bad: float, temperature: float) -> None:
    logits = torch.randn(1, 1, 3, 100, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 1, 77] = bad
    logits[0, 0, 2] = -math.inf
    sampling = Sampling.of([SamplingParams(temperature=temperature, seed=1)], 100, "cpu")
    draft = candidates(logits, torch.tensor([5]), sampling, 4)
    assert (draft.logprob[0, 0] > -math.inf).any(-1).tolist() == [True, False, False]
    assert not draft.logprob.isnan().any()
