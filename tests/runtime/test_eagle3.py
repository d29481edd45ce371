"""EAGLE-3 heads in the loop: every policy writes plain decoding's text, and drafts what the reference drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from d2sd.modeling.kv_pool import PoolSizes
from d2sd.plugins.choice import candidates
from d2sd.plugins.trees import Draft
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.modeling.test_eagle3 import Reference
from tests.runtime.cheating import CheatingRunner, changing
from tests.runtime.helpers import (
    BLOCK,
    expected,
    make_engine,
    models,
    poison_what_is_given_up,
    run_staggered,
    some_requests,
    texts_of,
)
from tests.runtime.test_lossless import WAYS, Way
from tests.tiny import prepared, tiny_eagle

POLICIES = ("off", "lookup", "chain", "reanchor", "ddtree", "hybrid")
IDS = tuple(range(1, 64, 3))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_with_drafts_that_are_often_right(policy: str, way: Way) -> None:
    requests, target = some_requests(), models()[0]
    runner = CheatingRunner(target, tiny_eagle(target.config, steps=BLOCK - 1), None, texts_of(requests))
    engine = way.engine(runner, policy, lookup=policy in ("ddtree", "hybrid"))
    stats = way.run(engine, requests)
    rows = engine.policy.num_nodes
    if policy not in ("off", "lookup"):
        assert stats.accepted.keys() == set(range(1, min(rows, BLOCK) + 1))
    if rows > BLOCK and policy in ("reanchor", "hybrid"):
        assert sum(count for branch, count in stats.accepted_branches.items() if branch > 0) > 15


class Compared(ModelRunner):
    """Compares what is drafted with the reference, however the tokens before it were committed."""

    texts: dict[int, tuple[int, ...]]
    params: dict[int, SamplingParams]
    seen: int = 0

    def allocate(self, sizes: PoolSizes) -> None:
        super().allocate(sizes)
        changing(self.drafts, "first", self._compared)

    def _compared(self, drafted: Draft, batch: Batch, _width: int) -> Draft:
        target = models()[0]
        head = tiny_eagle(target.config, draft_vocabulary=IDS)
        for row in batch.active.nonzero()[:, 0].tolist():
            length, seed = int(batch.where.context_len[row]), int(batch.sampling.seed[row])
            if not length:
                continue  # no feature of the target is there yet
            reference = Reference(head, target, list(self.texts[seed][: length + 1]))
            taken = drafted.top1[row].tolist()[: head.config.drafts]
            logits = torch.tensor(np.array(reference.draft(taken, len(taken)))).float()
            place, sampling = torch.tensor([length]), Sampling.of([self.params[seed]], self.vocab_size, "cpu")
            best = candidates(logits[None, None], place, sampling, 1, torch.tensor(IDS))
            assert taken == best.top1[0, 0].tolist()
            torch.testing.assert_close(drafted.confidence[row, : len(taken)], best.confidence[0, 0], atol=1e-4, rtol=0)
            self.seen += 1
        return drafted


@pytest.mark.parametrize("pages", [None, 12])
@pytest.mark.parametrize("policy", ["chain", "hybrid"])
def test_drafts_are_those_of_the_reference(policy: str, pages: int | None) -> None:
    """Prompts in chunks of odd lengths that share their beginnings, greedy and sampled, in flight and preempted, in
    pages of NaN. Each slot is drafted behind the candidate that a chain takes, which noise may have chosen.
    """
    prompt, target = some_requests()[4].prompt, models()[0]
    params = [SamplingParams(temperature=n % 2, seed=60 + n) for n in range(6)]
    lengths = zip((17, 16, 13, 9, 2, 17), params, strict=True)
    requests = [Request(prompt[:length], 14, one) for length, one in lengths]
    runner = Compared(*prepared(target, tiny_eagle(target.config, draft_vocabulary=IDS)), block_size=4)
    runner.texts, runner.params = texts_of(requests), {one.seed or 0: one for one in params}
    engine = make_engine(runner, policy, page_size=4, prefill_chunk=5, max_batch=4, pages=pages)
    poison_what_is_given_up(runner)
    sequences = run_staggered(engine, requests, gap=2)
    assert [s.answer for s in sequences] == [expected(request) for request in requests]
    assert runner.seen > 30
    assert (sum(s.stats.preemptions for s in sequences) > 0) == (pages is not None)
