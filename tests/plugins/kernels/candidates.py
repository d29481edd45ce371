"""Candidates of several branches a request, of requests that sample in different ways."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from d2sd.plugins.choice import candidates
from d2sd.plugins.trees import Branches
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.plugins.kernels.calls import there
from tests.plugins.kernels.trees import stable_topk
from tests.plugins.on_kernels import run_kernels

__all__ = ["stable_topk"]
SAMPLED = SamplingParams(0.6, seed=3)


def test_each_branch_has_the_parameters_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a request are its branches times their slots."""
    logits = torch.randn(2, 3, 1, 63, generator=torch.Generator().manual_seed(1)) * 3
    params = [SamplingParams(0.6, seed=3), SamplingParams(1.5, top_k=4, seed=2**40 + 9)]
    given = logits, torch.tensor([5, 1000]), Sampling.of(params, 63, "cpu"), 5
    run_kernels(monkeypatch, "choice", on=False)
    expected = candidates(*given)
    run_kernels(monkeypatch, "choice")
    found = candidates(*(there(x) for x in given))
    proposed = expected.logprob > float("-inf")
    assert torch.equal(found.tokens.cpu().where(proposed, 0), expected.tokens.where(proposed, 0))
    torch.testing.assert_close(found.logprob.cpu(), expected.logprob, rtol=1e-6, atol=4e-6)


def rejections(vocab: int) -> Iterator[tuple[list[int], list[int]]]:
    """Ascending ids, and tokens: the first and the last, one behind them, one between, none."""
    ids = [3 * i + 5 for i in range(vocab)]
    yield ids, [ids[0], ids[-1], ids[-1] + 3, ids[vocab // 2] + 1, -1, ids[vocab // 3]]
    yield [], [0, vocab - 1, vocab // 2, -1, -1, vocab // 3]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("vocab", [2, 63, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_rejected_tokens(
    vocab: int, dtype: torch.dtype, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected tokens are the likeliest of their slots, and no candidates."""
    for ids, tokens in rejections(vocab):
        length = torch.tensor([[0, 2, 1], [2, 3, 3]])  # 3: nothing is left to draft, or, with a token, the last slot
        branches = Branches(torch.zeros(2, 3, 3, dtype=torch.long), length, torch.tensor(tokens).view(2, 3))
        logits = torch.randn(2, 3, 3, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
        left = logits.float()
        for branch, token in enumerate(tokens):
            index = ids.index(token) if token in ids else token if not ids else -1
            if index >= 0:
                logits[branch // 3, branch % 3, :, index] = 9
                left[branch // 3, branch % 3, :, index] = 9
                left[branch // 3, branch % 3, min(int(length.flatten()[branch]), 2), index] = -math.inf
        known = torch.tensor(ids) if ids else None
        given = torch.tensor([5, 1000]), Sampling.of([params] * 2, ids[-1] + 1 if ids else vocab, "cpu"), 2, known
        run_kernels(monkeypatch, "choice", on=False)
        expected = candidates(left, *given)
        run_kernels(monkeypatch, "choice")
        found = candidates(there(logits), *(there(x) for x in (*given, branches)))
        proposed = expected.logprob > -math.inf
        assert torch.equal(found.tokens.cpu().where(proposed, 0), expected.tokens.where(proposed, 0))
        torch.testing.assert_close(found.logprob.cpu(), expected.logprob, rtol=1e-6, atol=4e-6)
