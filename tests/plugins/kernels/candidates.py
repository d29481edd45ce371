"""Candidates of several branches a request, of requests that sample in different ways."""

from __future__ import annotations

import pytest
import torch

from d2sd.plugins import choice
from d2sd.plugins.choice import candidates
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.plugins.kernels.calls import there
from tests.plugins.on_kernels import run_kernels


def test_each_branch_has_the_parameters_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a request are its branches times their slots."""
    logits = torch.randn(2, 3, 1, 63, generator=torch.Generator().manual_seed(1)) * 3
    params = [SamplingParams(0.6, seed=3), SamplingParams(1.5, top_k=4, seed=2**40 + 9)]
    given = logits, torch.tensor([5, 1000]), Sampling.of(params, 63, "cpu"), 5
    run_kernels(monkeypatch, choice.OP, on=False)
    expected = candidates(*given)
    run_kernels(monkeypatch, choice.OP)
    found = candidates(*(there(x) for x in given))
    proposed = expected.logprob > float("-inf")
    assert torch.equal(found.tokens.cpu().where(proposed, 0), expected.tokens.where(proposed, 0))
    torch.testing.assert_close(found.logprob.cpu(), expected.logprob, rtol=1e-6, atol=4e-6)
