"""The quick estimate of tau against the runtime: the same drafter, the same answers, the same steps."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from d2sd.modeling.drafter import Drafter
from d2sd.runtime.engine import Engine
from d2sd.runtime.executor import TorchExecutor
from d2sd.runtime.policy import make_policy
from d2sd.runtime.request import Limits, Request
from d2sd.train.estimate import estimate_tau
from d2sd.train.features import cache_features
from d2sd.train.loop import Trainer
from tests.train.helpers import BLOCK, TAPS, exact_features, greedy_answers, new_drafter, settings, target


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """One that is sometimes right."""
    made = new_drafter()
    short = settings(steps=12, batch=4, blocks=16)
    Trainer(target(), made, exact_features(greedy_answers()), short).run(
        tmp_path_factory.mktemp("drafter"), lambda step, loss: None
    )
    return made


def measured(drafter: Drafter) -> list[float]:
    """Tokens a step of every answer, by the chain policy."""
    engine = Engine(
        TorchExecutor(deepcopy(target()), deepcopy(drafter)),  # it may repack weights
        make_policy("chain", block_size=BLOCK, branches=0, row_budget=BLOCK),
        Limits(max_batch=2, max_context=64, page_size=4, prefill_chunk=8),
    )
    answers = greedy_answers()
    done = engine.generate(Request(tuple(a.prompt_ids), max_new_tokens=len(a.answer_ids)) for a in answers)
    assert [s.answer for s in done] == [a.answer_ids for a in answers]
    return [len(s.answer) / s.stats.steps for s in done]


def test_estimate_is_what_the_runtime_measures(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 exactly, sequence by sequence."""
    monkeypatch.setattr(torch, "autocast", lambda *args: nullcontext())
    data, found = exact_features(greedy_answers()), []
    rest = data
    while len(rest) > 1:
        one, rest = rest.split(1)
        found.append(estimate_tau(target(), drafter, one))
    found.append(estimate_tau(target(), drafter, rest))
    expected = measured(drafter)
    assert found == pytest.approx(expected)
    assert 1 < min(expected) < max(expected) < BLOCK, "neither always right nor always wrong"
    assert estimate_tau(target(), drafter, data) == pytest.approx(sum(expected) / 4)


def test_in_training_it_differs_by_bf16_alone(drafter: Drafter, tmp_path: Path) -> None:
    data = cache_features(target(), TAPS, greedy_answers(), tmp_path / "features", lambda count: None)
    expected = measured(drafter)
    assert estimate_tau(target(), drafter, data) == pytest.approx(sum(expected) / 4, rel=0.1)
