"""Drafts chosen among a part of the vocabulary: as if the rest had no probability, and the text stays the target's."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.plugins.choice import candidates
from d2sd.plugins.trees import Branches, Draft, mask_rejected, restart_blocks
from d2sd.policies import DrafterRole, PolicyName
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.cheating import changing
from tests.runtime.cuda_graphs import test_capture as test_capturable
from tests.runtime.cuda_graphs.test_capture import HOT, check_same, record, running
from tests.runtime.helpers import BLOCK, BRANCHES, STEADY, copies, expected, plain, some_requests
from tests.runtime.test_lossless import WAYS
from tests.runtime.test_model_runner import TABLE, TEXTS, prefilled
from tests.tiny import prepared, runner_of

Ids = tuple[int, ...] | None
FIRST, SECOND, *_ = DrafterRole


@cache
def frequent(count: int | None) -> Ids:
    """The commonest tokens of the requests' answers, all ids without a count; 63 is the mask."""
    if count is None:
        return None
    counts = Counter(token for request in some_requests() for token in expected(request))
    return tuple(sorted([token for token, _ in counts.most_common() if token != 63][:count]))


def narrowed(drafter: Drafter, ids: Ids) -> Drafter:
    made = Drafter(replace(drafter.config, draft_vocabulary=ids))
    made.load_state_dict(drafter.state_dict())
    return made.eval().requires_grad_(False)


class Coached(ModelRunner):
    """Drafters lean to the plain text's next token where their vocabulary has it, unless dice decide otherwise.

    Logits are all it touches: what is forbidden, chosen and named behind them is the real thing.
    """

    def __init__(self, first: Ids, second: Ids) -> None:
        target, one, two, _ = copies()
        super().__init__(*prepared(target, narrowed(one, first), narrowed(two, second)))
        every = tuple(range(self.vocab_size))
        self.ids = tuple(first or every), tuple(second or every)
        self.told = [0, 0]  # slots where the right token was leant to
        self._texts = {
            r.seed: r.prompt + plain(r.prompt, r.sampling, r.max_new_tokens + BLOCK) for r in some_requests()
        }
        changing(self.drafts, "_pass", self._coached)
        changing(self.drafts, "first", lambda draft, *_: self._within(FIRST, draft))
        changing(self.drafts, "second", lambda draft, batch, branches, role, width: self._within(role, draft))

    def _coached(
        self, found: tuple[Tensor, Tensor], role: DrafterRole, batch: Batch, blocks: Tensor, *_: object
    ) -> tuple[Tensor, Tensor]:
        logits, hidden = found
        assert logits.shape[-1] == len(self.ids[role])
        place = {token: index for index, token in enumerate(self.ids[role])}
        for row, (seed, start) in enumerate(
            zip(batch.sampling.seed.tolist(), batch.where.context_len.tolist(), strict=True)
        ):
            text = self._texts.get(seed % 2**64, ())
            for slot, right in enumerate(text[start + 1 : start + BLOCK]):
                if right in place and random.Random(f"{seed} {start} {slot} {role:d}").random() < 0.8:
                    logits[row, :, slot, place[right]] += 12
                    self.told[role] += 1
        return logits, hidden

    def _within(self, role: DrafterRole, draft: Draft) -> Draft:
        assert not draft.logprob.isnan().any()
        assert set(draft.tokens.flatten().tolist()) <= set(self.ids[role])
        return draft


def test_what_a_vocabulary_lacks_is_not_gained() -> None:
    way = WAYS["batch"]
    tau = [way.run(way.engine(Coached(frequent(n), None), "chain"), some_requests()).tau for n in (8, 24, None)]
    assert tau == sorted(tau)
    assert tau[2] > tau[1] + 0.3 > tau[0] + 0.6


def test_one_copy_of_the_head_for_each_vocabulary() -> None:
    same, other, single = (Coached(frequent(24), ids) for ids in (frequent(24), frequent(16), None))
    assert same.drafts.tables[FIRST].head is same.drafts.tables[SECOND].head
    assert other.drafts.tables[FIRST].head is not other.drafts.tables[SECOND].head
    assert single.drafts.tables[SECOND].head == single.target.raw_logits


# -- the same drafts as a whole head whose other tokens are impossible -------------------------------------------------

IDS = (0, 3, 5, 9, 12, 20, 33, 41, 50, 62)


def masked(logits: Tensor, ids: Tensor) -> Tensor:
    """[..., V] with -inf outside the ids."""
    outside = torch.ones(logits.shape[-1], dtype=torch.bool)
    outside[ids] = False
    return logits.masked_fill(outside, -torch.inf)


def check_equal(draft: Draft, wanted: Draft) -> None:
    torch.testing.assert_close(draft.logprob, wanted.logprob, atol=1e-5, rtol=1e-5)
    proposes = wanted.logprob.isfinite()  # what is not proposed may stand in any order
    assert proposes.any()
    assert torch.equal(draft.tokens.where(proposes, -1), wanted.tokens.where(proposes, -1))


sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 2**64 - 1),
)


@pytest.mark.slow
@STEADY
@given(
    st.lists(sampling, min_size=1, max_size=3),
    st.integers(0, 10_000),
    st.integers(1, 10),
    st.sets(st.integers(0, 19), min_size=2),
)
def test_candidates_are_those_of_a_masked_head(
    params: list[SamplingParams], seed: int, width: int, ids: set[int]
) -> None:
    """Noise and filters too: both know tokens by the target's ids. Rejected ones are inside and outside."""
    dice = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(params), 2, 3, 20, generator=dice)
    known, width = torch.tensor(sorted(ids)), min(width, len(ids))
    branches = Branches(
        torch.zeros(len(params), 2, 3, dtype=torch.long),
        torch.randint(0, 4, (len(params), 2), generator=dice),
        torch.randint(-1, 20, (len(params), 2), generator=dice),
    )
    drawn = Sampling.of(params, 20, "cpu")
    context = 10 * torch.arange(1, len(params) + 1)
    small = mask_rejected(branches, logits[..., known], known)
    whole = mask_rejected(branches, masked(logits, known))
    check_equal(candidates(small, context, drawn, width, known), candidates(whole, context, drawn, width))


def test_a_rejected_token_outside_the_vocabulary_forbids_nothing() -> None:
    known = torch.tensor([2, 5, 6])
    length, rejected = torch.tensor([[0, 1, 2, 3, 3, 1]]), torch.tensor([[0, 2, 4, 6, 9, -1]])
    branches = Branches(torch.zeros(1, 6, 4, dtype=torch.long), length, rejected)
    logits = mask_rejected(branches, torch.zeros(1, 6, 4, 3), known)
    # request, branch, slot behind the boundary, place in the vocabulary
    assert logits.isinf().nonzero().tolist() == [[0, 1, 1, 0], [0, 3, 3, 2]]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, top_k=9, seed=3)])
def test_the_executor_drafts_as_with_a_masked_head(params: SamplingParams) -> None:
    """Either drafter runs both passes, each with its own vocabulary."""
    whole, batch = prefilled(TEXTS, TABLE)
    batch = replace(batch, sampling=Sampling.of([params] * len(TEXTS), whole.vocab_size, "cpu"))
    vocabularies = IDS, IDS[::2]
    target, *drafters, _ = copies()
    small = runner_of(target, *map(narrowed, drafters, vocabularies))
    small.drafts.read_from(whole.target_pool, whole.drafts._pools, whole.context)
    width = len(IDS[::2])

    def wanted(which: DrafterRole, logits: Tensor) -> Draft:
        ids = torch.tensor(vocabularies[which])
        return candidates(masked(logits, ids), batch.where.context_len, batch.sampling, width)

    first = small.drafts.first(batch, width + 3)  # there are not so many in the second vocabulary
    masks = torch.full((len(TEXTS), 1, BLOCK - 1), 63)
    logits, _ = whole.drafts._pass(FIRST, batch, torch.cat([batch.anchor[:, None, None], masks], -1))
    expected_first = wanted(FIRST, logits)
    check_equal(first, Draft(expected_first.tokens[:, 0], expected_first.logprob[:, 0]))
    for which in (FIRST, SECOND):
        length = torch.tensor([[0, 2, 3], [3, 1, 4], [1, 2, 0]])
        rejected = torch.tensor([[IDS[0], IDS[1], 8], [IDS[4], 62, -1], [IDS[2], IDS[3], IDS[6]]])
        branches = Branches(first.top1[:, None].expand(-1, BRANCHES, -1), length, rejected)
        logits, _ = whole.drafts._pass(which, batch, restart_blocks(branches, batch.anchor, 63))
        check_equal(
            small.drafts.second(batch, branches, which, width + 3), wanted(which, mask_rejected(branches, logits))
        )


@pytest.mark.parametrize("policy", ["chain", "hybrid"])
def test_nothing_is_read_back(policy: PolicyName, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with vocabularies can be captured in a graph like any other."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)
    target, first, second, _ = copies()
    made = runner_of(target, narrowed(first, IDS), narrowed(second, frequent(24)))
    monkeypatch.setattr(test_capturable, "honest", lambda *_: made)
    check_same(record(running(policy, HOT, SamplingParams()), 3))
