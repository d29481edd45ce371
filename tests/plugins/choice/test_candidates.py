"""Drafters propose blocks that restart, and candidates that follow the target's noise where it samples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d2sd.plugins.choice import candidates
from d2sd.plugins.choice.reference import CANDIDATE_POOL, gumbel
from d2sd.plugins.trees import Branches, Draft, mask_rejected, restart_blocks
from d2sd.plugins.trees.reference.branches import splice
from d2sd.runtime.sampling.penalties import Text
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.helpers import STEADY, choices
from tests.runtime.oracle import allowed

# Four slots behind each anchor. The last branch keeps everything.
BRANCHES = Branches(
    torch.tensor([[[1, 2, 50, 51], [52, 53, 54, 55]], [[4, 5, 6, 56], [4, 5, 6, 7]]]),
    torch.tensor([[2, 0], [3, 4]]),
    torch.tensor([[3, 1], [7, -1]]),
)


def test_blocks_keep_the_prefix_and_mask_the_rest() -> None:
    assert restart_blocks(BRANCHES, torch.tensor([8, 9]), 99).tolist() == [
        [[8, 1, 2, 99, 99], [8, 99, 99, 99, 99]],
        [[9, 4, 5, 6, 99], [9, 4, 5, 6, 7]],
    ]


def test_only_the_rejected_token_is_forbidden() -> None:
    logits = mask_rejected(BRANCHES, torch.zeros(2, 2, 4, 10))
    # request, branch, slot behind the boundary, token; nothing where no token was rejected
    assert logits.isinf().nonzero().tolist() == [[0, 0, 2, 3], [0, 1, 0, 1], [1, 0, 3, 7]]
    assert (logits[logits.isinf()] < 0).all()


def test_branches_join_both_drafts() -> None:
    second = Draft(torch.arange(100, 132).view(2, 2, 4, 2), torch.zeros(2, 2, 4, 2))
    assert splice(BRANCHES, second).tolist() == [
        [[1, 2, 104, 106], [108, 110, 112, 114]],
        [[4, 5, 6, 122], [4, 5, 6, 7]],
    ]


GREEDY = SamplingParams()
hot = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_p=st.sampled_from([1e-6, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 16]),
    seed=st.integers(0, 2**64 - 1),
)
VOCAB = 20


def logits_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def proposed(logits: Tensor, params: list[SamplingParams], width: int) -> Draft:
    """logits [B, K, S, V] at context lengths 10, 20, …"""
    context = 10 * torch.arange(1, len(params) + 1)
    return candidates(logits, context, Sampling.of(params, logits.shape[-1], "cpu"), width)


def noise_at(params: SamplingParams, row: int, slot: int, vocab: int) -> list[float]:
    """Return what the target adds to its scores for the token in `slot` behind the anchor of request `row`."""
    number = params.seed or 0
    seed = number - 2**64 if number >= 2**63 else number
    place = torch.tensor([[10 * (row + 1) + 1 + slot]])
    noise: list[float] = gumbel(torch.tensor([seed]), place, vocab)[0, 0].tolist()
    return noise


@STEADY
@given(st.integers(0, 10_000), st.integers(1, 3), st.sampled_from([1, 3, VOCAB, VOCAB + 7]))
def test_greedy_candidates_are_the_likeliest_tokens(seed: int, count: int, width: int) -> None:
    logits = logits_of(seed, 2, count, 4, VOCAB)
    draft = proposed(logits, [GREEDY, SamplingParams(top_k=2, top_p=0.5, seed=9)], width)  # filters need a temperature
    logprob, tokens = logits.log_softmax(-1).topk(min(width, VOCAB), dim=-1)
    assert torch.equal(draft.tokens, tokens)
    torch.testing.assert_close(draft.logprob, logprob, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@STEADY
@given(st.lists(hot, min_size=1, max_size=3), st.integers(0, 10_000), st.integers(1, 2), st.integers(1, VOCAB))
def test_sampled_candidates_follow_the_noise(params: list[SamplingParams], seed: int, count: int, width: int) -> None:
    """logits / T and the target's noise, renormalised; what a filter takes out is not proposed."""
    logits = logits_of(seed, len(params), count, 3, VOCAB)
    draft = proposed(logits, params, width)
    for row, one in enumerate(params):
        for branch in range(count):
            for slot in range(3):
                kept = allowed(logits[row, branch, slot].tolist(), one)
                noise = noise_at(one, row, slot, VOCAB)
                score = {token: math.log(p) + noise[token] for token, p in kept.items()}
                total = math.log(sum(math.exp(s) for s in score.values()))
                tokens = draft.tokens[row, branch, slot].tolist()
                said = draft.logprob[row, branch, slot].tolist()
                assert len(set(tokens)) == width
                assert said == sorted(said, reverse=True)
                wanted = [score[t] - total if t in score else -math.inf for t in tokens]
                assert said == pytest.approx(wanted, abs=1e-3)
                assert set(tokens) >= set(sorted(score, key=lambda t: -score[t])[:width])


@STEADY
@given(st.lists(st.one_of(st.just(GREEDY), hot), min_size=1, max_size=4), st.integers(0, 10_000))
def test_a_drafter_as_good_as_the_target_proposes_what_it_chooses(params: list[SamplingParams], seed: int) -> None:
    logits = logits_of(seed, len(params), 1, 4, VOCAB)
    sampling = Sampling.of(params, VOCAB, "cpu")
    context = 10 * torch.arange(1, len(params) + 1)
    depth = torch.arange(4).expand(len(params), 4)
    chosen = choices(logits[:, 0], depth, context, 4, sampling)
    assert torch.equal(proposed(logits, params, 3).top1[:, 0], chosen)


def test_noise_reaches_the_likeliest_tokens_of_a_large_vocabulary() -> None:
    """Beyond them it is not computed: a token there is never proposed, and their probabilities add up to one."""
    logits = logits_of(1, 1, 1, 2, 500)
    one = SamplingParams(temperature=1.0, seed=5)
    draft = proposed(logits, [one], CANDIDATE_POOL)
    for slot in range(2):
        pool = logits[0, 0, slot].topk(CANDIDATE_POOL).indices.tolist()
        assert sorted(draft.tokens[0, 0, slot].tolist()) == sorted(pool)
        noise = noise_at(one, 0, slot, 500)
        assert int(draft.top1[0, 0, slot]) == max(pool, key=lambda t: float(logits[0, 0, slot, t]) + noise[t])
    torch.testing.assert_close(draft.logprob.exp().sum(-1), torch.ones(1, 1, 2))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, seed=3), SamplingParams(1.0, top_k=2, seed=3)])
def test_a_forbidden_token_is_never_proposed(params: SamplingParams) -> None:
    """Though it is the likeliest, and though all other tokens are proposed."""
    logits = torch.zeros(1, 1, 2, 6)
    logits[..., 4] = 9.0
    branches = Branches(torch.zeros(1, 1, 2, dtype=torch.long), torch.tensor([[1]]), torch.tensor([[4]]))
    draft = proposed(mask_rejected(branches, logits), [params], 6)
    told = dict(zip(draft.tokens[0, 0, 1].tolist(), draft.logprob[0, 0, 1].tolist(), strict=True))
    assert told.pop(4) == -math.inf
    assert sum(math.exp(p) for p in told.values()) == pytest.approx(1, abs=1e-5)
    assert int(draft.top1[0, 0, 0]) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocab", [VOCAB, 300])
def test_drafts_follow_bias_and_penalties_of_the_text_so_far(temperature: float, vocab: int) -> None:
    """Drafts are penalized like the target's tokens: none that is excluded is proposed; a neighbour's are unchanged."""
    logits = logits_of(4, 2, 1, 1, vocab)
    best = logits[0, 0, 0].topk(4).indices.tolist()
    loud = SamplingParams(
        temperature, seed=1, logit_bias={best[0]: -100.0}, presence_penalty=2.0, repetition_penalty=9.0, min_tokens=1
    )
    plain = SamplingParams(temperature, seed=2)
    text = Text([best[1], best[1]], 2, frozenset({best[2]}))
    sampling = Sampling.of([loud, plain], vocab, "cpu", [text, Text([0], 1)])
    context = torch.tensor([1, 20])
    draft = candidates(logits, context, sampling, 3)
    scores = choices(logits[:, 0], torch.zeros(2, 1, dtype=torch.long), context, 1, sampling)
    assert draft.tokens[:, 0, 0, 0].tolist() == scores[:, 0].tolist()
    assert int(draft.tokens[0, 0, 0, 0]) not in best[:3]
    assert (draft.logprob <= 0).all()
    alone = candidates(logits[1:], context[1:], Sampling.of([plain], vocab, "cpu"), 3)
    assert torch.equal(alone.tokens[0], draft.tokens[1])
    torch.testing.assert_close(alone.logprob[0], draft.logprob[1], atol=1e-5, rtol=1e-5)
    if not temperature:
        changed = sampling.penalties.apply(sampling.bias.apply(logits[:, 0, 0], context + 1))  # type: ignore[union-attr]
        wanted = changed[0].log_softmax(-1).topk(3).values
        torch.testing.assert_close(draft.logprob[0, 0, 0], wanted, atol=1e-4, rtol=1e-4)
