"""The kernels from logits to tokens against the functions of the runtime that specify them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from d2sd.plugins.choice import best_token, candidates, choose
from d2sd.plugins.choice.reference import _gumbel, philox
from d2sd.plugins.choice.triton.tokens import _gumbel as gumbel_of_words
from d2sd.plugins.choice.triton.tokens import philox_words
from d2sd.runtime.sampling.sample import Sampling, token_scores
from d2sd.runtime.sampling_params import SamplingParams
from tests.plugins.kernels.calls import there
from tests.plugins.kernels.trees import specification, stable_topk
from tests.plugins.on_kernels import run_kernels

__all__ = ["specification", "stable_topk"]
GREEDY = [SamplingParams(seed=2)] * 2
SAMPLED = [SamplingParams(1.0, seed=2**64 - 7), SamplingParams(0.3, seed=3)]
MIXED = [SamplingParams(0.7, seed=5), SamplingParams(seed=6)]
TOP = [SamplingParams(1.3, seed=5, top_p=0.8, top_k=9), SamplingParams(0.6, seed=6, min_p=0.1, top_p=0.5)]
NUCLEUS = SamplingParams(0.9, seed=8, top_p=0.95)
KINDS = (GREEDY, SAMPLED, MIXED, TOP)
CHOICES = (GREEDY, SAMPLED, MIXED, TOP, [TOP[0], GREEDY[0]], [NUCLEUS, TOP[1]])
#: Nodes or slots, tokens: one block, several, a tail of one; one token alone.
SIZES = ((3, 1), (2, 63), (3, 1000), (2, 4097))


def sampling_of(params: list[SamplingParams], vocab: int) -> Sampling:
    return Sampling.of(params, vocab, "cpu")


def logits_of(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Few distinct values, so that many tie; some rows hold -inf alone, one token alone, or equal numbers."""
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=draw) * 3).to(dtype)
    rows = x.view(-1, shape[-1])
    rows[0] = float("-inf")
    rows[0, -1] = 1.0
    rows[1 % len(rows)] = -0.0
    rows[1 % len(rows), shape[-1] // 2 :] = 0.0
    rows[2 % len(rows)].masked_fill_(torch.rand(shape[-1], generator=draw) < 0.5, float("-inf"))
    rows[2 % len(rows), 0] = 2.0
    return x


@triton.jit  # type: ignore[untyped-decorator]
def words_kernel(seed, position, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, SIZE)
    w0, w1, w2, w3 = philox_words(tl.load(seed), tl.load(position), n * 7919)
    tl.store(out + n, w0.to(tl.int64))
    tl.store(out + SIZE + n, w1.to(tl.int64))
    tl.store(out + 2 * SIZE + n, w2.to(tl.int64))
    tl.store(out + 3 * SIZE + n, w3.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_words_are_those_of_the_specification(seed: int) -> None:
    key, position = torch.tensor(seed), torch.tensor(2**31 - 1)
    out = there(torch.empty(4, 64, dtype=torch.long))
    words_kernel[(1,)](there(key), there(position), out, SIZE=64)
    zero = torch.tensor(0)
    expected = philox(
        (key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF), (torch.arange(64) * 7919, position.expand(64), zero, zero)
    )
    assert torch.equal(out.cpu(), torch.stack(list(expected)))


@triton.jit  # type: ignore[untyped-decorator]
def noise_kernel(words, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, SIZE)
    tl.store(out + n, gumbel_of_words(tl.load(words + n).to(tl.uint32)))


def test_noise_keeps_its_digits_at_both_ends() -> None:
    """Where the uniform number is next to 0 and to 1: there the logarithm of an approximation would be anything."""
    words = torch.cat(
        [torch.arange(256) << 9, 2**31 + (torch.arange(-128, 128) << 9), 2**32 - 1 - (torch.arange(512) << 9)]
    )
    out = there(torch.empty(1024))
    noise_kernel[(1,)](there(words), out, SIZE=1024)
    torch.testing.assert_close(out.cpu(), _gumbel(words), rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("nodes", "vocab", "params"),
    [
        pytest.param(*size, params, marks=[] if size[1] in (1, 63) or turn in (6, 11) else pytest.mark.slow)
        for turn, (params, size) in enumerate(product(CHOICES, SIZES))
    ],
)
def test_choice(nodes: int, vocab: int, params: list[SamplingParams]) -> None:
    logits = logits_of(1, 2, nodes, vocab)
    depth = torch.arange(nodes).expand(2, -1)
    context, sampling = torch.tensor([5, 1000]), sampling_of(params, vocab)
    if vocab > 1:
        logits[1, 1] = float("-inf")
        logits[1, 0, vocab // 2] = float("nan")
    if vocab > 1000:
        logits[0, 1, vocab // 3] = float("inf")
    noise = sampling.noise(context, nodes, vocab)
    expected = [
        best_token(token_scores(logits[:, n].float(), context, sampling, None if noise is None else noise[:, n]))
        for n in range(nodes)
    ]
    found = choose.triton(*map(there, (logits, context, depth, sampling)))
    assert torch.equal(found.cpu(), torch.stack(expected, dim=1))


def how_often(turn: int, size: int, width: int, kind: int) -> list[pytest.MarkDecorator]:
    """A few at every change; in CI a third: all pairs of a size, a width and a kind of sampling."""
    if turn in (19, 20, 36):
        return []
    return [pytest.mark.slow] if (size + kind) % 3 == width else [pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize(
    ("slots", "vocab", "width", "params"),
    [
        pytest.param(*SIZES[size], (1, 5, 16)[width], KINDS[kind], marks=how_often(turn, size, width, kind))
        for turn, (size, width, kind) in enumerate(product(range(4), range(3), range(4)))
    ],
)
def test_candidates(
    slots: int, vocab: int, width: int, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    branches = 2 if vocab < 1000 else 1  # a request has several rows of each slot
    logits, context = logits_of(2, 2, branches, slots, vocab), torch.tensor([5, 1000])
    ids = None if width == 5 else torch.arange(vocab) * 3 + 1
    made: list[tuple[Tensor, Tensor]] = []
    sampling = sampling_of(params, vocab * 3 + 1)
    for on_kernels in (False, True):
        run_kernels(monkeypatch, "choice", on=on_kernels)
        given: tuple[Any, ...] = (logits if on_kernels else logits.float(), context, sampling, width, ids)
        draft = candidates(*(there(x) if on_kernels else x for x in given))
        made.append((draft.tokens.cpu(), draft.logprob.cpu()))
    (tokens, logprob), (found, scores) = made
    assert torch.equal(found.where(logprob > float("-inf"), 0), tokens.where(logprob > float("-inf"), 0))
    # differences of numbers up to 50, of which fp32 holds 4e-6
    torch.testing.assert_close(scores, logprob, rtol=1e-6, atol=1e-6 if params is GREEDY else 4e-6)


@pytest.mark.parametrize("params", [GREEDY, [SAMPLED[0], TOP[1]]], ids=("greedy", "one filtered"))
def test_an_overflow_is_no_proposal(params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(3, 2, 1, 3, 200, dtype=torch.float32)
    logits[0, 0, 0, 7], logits[0, 0, 1, 8], logits[1, 0, 2] = float("nan"), float("inf"), float("-inf")
    sampling = sampling_of(params, 200)
    run_kernels(monkeypatch, "choice", on=False)
    expected = candidates(logits, torch.tensor([1, 2]), sampling, 4)
    run_kernels(monkeypatch, "choice")
    found = candidates(there(logits), there(torch.tensor([1, 2])), there(sampling), 4)
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    torch.testing.assert_close(found.logprob.cpu(), expected.logprob, rtol=1e-6, atol=1e-6)
