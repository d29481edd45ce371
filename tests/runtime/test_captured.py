"""Captured steps give the tokens and pages of steps that run operator by operator, whatever overwrites their memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.policies import NAMES, PolicyName
from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.batch import Batch
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request, SamplingParams
from d2sd.runtime.sampling.philox import philox
from d2sd.runtime.speculation.draft import Branches, Draft
from d2sd.runtime.speculation.policy import make_policy
from tests.runtime.helpers import (
    BLOCK,
    BRANCHES,
    BUDGET,
    GREEDY,
    all_pages,
    check_pages,
    copies,
    expected,
    free_pages,
    honest,
    make_engine,
    plain,
)
from tests.runtime.recorded_graphs import RecordedGraphs

HOT, NARROW = SamplingParams(1.0, seed=1), SamplingParams(0.8, top_p=0.9, seed=2)


@pytest.fixture(autouse=True)
def layers_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the compiled layers of a CPU hide their operators."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)


class Knowing(ModelRunner):
    """Drafts the text of each request (by seed), with errors at random positions; by tensors alone, so it is captured.

    Random drafters are almost never right: nothing but the anchor would be committed.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(*copies())
        self._seeds = torch.tensor([r.sampling.seed for r in requests])
        texts = [[*r.prompt, *plain(r.prompt, r.sampling, r.max_new_tokens + BLOCK)] for r in requests]
        longest = max(map(len, texts))
        self._texts = torch.tensor([text + [0] * (longest - len(text)) for text in texts])

    @torch.inference_mode()
    def draft_first(self, batch: Batch, width: int) -> Draft:
        right, known = self._known(batch, 0)
        return _told(super().draft_first(batch, width), right, known)

    @torch.inference_mode()
    def draft_second(self, batch: Batch, branches: Branches, drafter: int, width: int) -> Draft:
        right, known = (x[:, None].expand(-1, BRANCHES, -1) for x in self._known(batch, 1))
        at_boundary = torch.arange(BLOCK - 1) == branches.prefix_len[..., None]
        known = known & ~(at_boundary & (right == branches.rejected[..., None]))
        return _told(super().draft_second(batch, branches, drafter, width), right, known)

    def _known(self, batch: Batch, salt: int) -> tuple[Tensor, Tensor]:
        """The right tokens [B, S], and at which slots they are drafted."""
        row = (batch.sampling.seed[:, None] == self._seeds).int().argmax(1, keepdim=True)
        place = batch.context_len[:, None] + 1 + torch.arange(BLOCK - 1)
        right = self._texts[row, place.clamp(max=self._texts.shape[1] - 1)]
        zero = torch.zeros_like(place)
        dice, *_ = philox((zero + batch.sampling.seed[:, None], zero), (place, zero + salt, zero, zero))
        return right, dice % 3 > 0


def _told(draft: Draft, right: Tensor, known: Tensor) -> Draft:
    """The draft with `right` as the best candidate of the `known` slots."""
    best = draft.tokens[..., :1]
    others = best.where(draft.tokens == right[..., None], draft.tokens)
    told = torch.cat([right[..., None], others[..., 1:]], -1)
    return Draft(told.where(known[..., None], draft.tokens), draft.logprob)


def some(count: int, *kinds: SamplingParams, length: int = 14, seed: int = 0) -> list[Request]:
    """Requests of different lengths; every third has the prompt of the one before it and more, for prefix hits."""
    dice, found = random.Random(seed), list[Request]()
    for index in range(count):
        prompt = tuple(dice.randrange(64) for _ in range(dice.randrange(1, 14)))
        if index % 3 == 2:
            prompt = found[-1].prompt + prompt[:3]
        kind = kinds[index % len(kinds)]
        params = SamplingParams(kind.temperature, kind.top_p, kind.top_k, seed=1 + index + 100 * seed)
        found.append(Request(prompt, dice.randrange(2, length), params))
    return found


def captured(runner: ModelRunner, policy: PolicyName = "d2sd", **settings: int | None) -> tuple[Engine, RecordedGraphs]:
    graphs = RecordedGraphs()
    return graphs.guard(make_engine(runner, policy, **settings)), graphs  # type: ignore[arg-type]


def served(engine: Engine, requests: Sequence[Request], policies: Sequence[PolicyName], dice: random.Random) -> None:
    """Serve requests that join and leave, every step by one of `policies`; all answers and pages are right."""
    made = [make_policy(name, block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET) for name in policies]
    sequences, waiting = [], list(requests)
    for step in range(100 * len(requests)):
        if waiting and (not engine.busy or dice.random() < 0.4):
            sequences.append(engine.submit(waiting.pop(0)))
        engine.policy = made[step // 3 % len(made)]
        engine.step()
        if step % 10 == 9:
            for one in engine.scheduler.running:
                check_pages(engine.runner, torch.tensor(one.pages), one.tokens[: one.cached])
        if not waiting and not engine.busy:
            break
    assert [s.answer for s in sequences] == [expected(r) for r in requests]
    assert free_pages(engine) == all_pages(engine)


def test_policies_take_turns_on_poisoned_memory() -> None:
    """Drafters that wait, requests that join and leave, prefix hits, preemption; two thirds of the drafts are right."""
    requests = some(6, GREEDY, NARROW)
    engine, graphs = captured(Knowing(requests), max_batch=2, pages=8)
    served(engine, requests, ("chain", "d2sd", "off"), random.Random(3))
    assert graphs.replays == engine.stats.steps > 15
    assert engine.stats.prefix_hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("turns", [*((name,) for name in NAMES), NAMES, ("chain", "hybrid"), ("off",) * 7 + ("d2sd",)])
@pytest.mark.parametrize("pages", [None, 14])
def test_every_policy_on_poisoned_memory(turns: Sequence[PolicyName], pages: int | None) -> None:
    """With 14 pages for three requests, some are preempted."""
    requests = some(14, GREEDY, NARROW, HOT, GREEDY, length=26, seed=1)
    engine, graphs = captured(Knowing(requests), max_batch=3, pages=pages)
    served(engine, requests, turns, random.Random(5))
    assert graphs.replays == engine.stats.steps > 30
    assert engine.stats.prefix_hit_tokens > 0
    assert (engine.stats.preemptions > 0) == (pages is not None)
