"""Features that wait for drafters take a bounded memory, whatever the prompts' lengths, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import CommittedRows, ContextRows, KVPool, PoolSizes
from d2sd.policies import DrafterRole, PolicyName
from d2sd.runtime.drafting import context as module
from d2sd.runtime.drafting.context import DrafterContext
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET, honest
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.runtime.soak import Soak
from tests.tiny import tiny_decoder

#: n·E of Qwen3-8B, whose drafters take five layers: 40,960 bytes a token in bf16.
WIDTH = 5 * 4096
PROMPT = 32_768


class Flat:
    """A drafter that notes how many rows it is given at a time."""

    config = None

    def __init__(self) -> None:
        self.rows: list[int] = []

    def context_keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.rows.append(features.shape[1])
        keys = torch.zeros(1, 1, features.shape[1], 1, 2)
        return keys, keys


def queued(context: DrafterContext) -> int:
    """Bytes of all features in the queues, those in several once."""
    entries = [entry.features for queue in context._queues.values() for _, entry in queue._entries]
    return sum({id(features): features.nbytes for features in entries}.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunk", [1, 512, 1024, 8192])
def test_a_prompt_of_32k_tokens_queues_64_megabytes_at_most(chunk: int) -> None:
    """On a GPU. Its rows are injected while it is prefilled, in products of many rows, each once."""
    body = replace(tiny_decoder().config.body, num_layers=1, num_kv_heads=1, head_dim=2, windows=(None,))
    drafters = Flat(), Flat()
    pools = {role: KVPool(body, PoolSizes(3, 16), torch.float32, "cpu") for role in tuple(DrafterRole)[:2]}
    of_roles = cast("dict[DrafterRole, Drafter]", dict(zip(pools, drafters, strict=True)))
    context = DrafterContext(of_roles, pools, torch.bfloat16)
    context._on_cpu = False
    number = torch.zeros(1, 1, dtype=torch.bfloat16)
    most, places = 0, torch.ones(chunk, dtype=torch.long)
    step = 16 if chunk == 1 else 1  # of single rows a sixteenth of the prompt will do
    for _ in range(0, PROMPT, chunk * step):
        context.add(ContextRows(number.expand(chunk, WIDTH), places, (places,)))
        most = max(most, queued(context))
    assert most <= 64_000_000
    context.inject(pools)
    for drafter in drafters:
        assert sum(drafter.rows) == PROMPT // step
        assert min(drafter.rows[:-1]) >= min(1024, PROMPT // step), "their weights are not read for a few rows"


def few(monkeypatch: pytest.MonkeyPatch, rows: int) -> int:
    """Queues are full with this many rows of the tests' models; returns the bytes of these."""
    size = rows * 2 * honest().target.config.body.hidden_size * 4
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", size)
    return size


def noting_queues(engine: Engine) -> list[int]:
    """Bytes in the queues whenever rows have been added to them. On a CPU each drafter has its own rows."""
    found: list[int] = []
    add = engine.runner.context.add

    def added(rows: CommittedRows | ContextRows) -> None:
        add(rows)
        context = engine.runner.context
        each = [sum(entry.features.nbytes for _, entry in queue._entries) for queue in context._queues.values()]
        found.append(max(each) if context._on_cpu else queued(context))

    engine.runner.context.add = added  # type: ignore[method-assign]
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("policy", "windows"),
    [
        ("off", "none"),
        ("d2sd", "mixed"),
        *(pytest.param(name, "none", marks=pytest.mark.full) for name in ("d2sd", "hybrid", "chain")),
        *(pytest.param(name, "mixed", marks=pytest.mark.full) for name in ("off", "hybrid", "chain")),
    ],
)
def test_answers_are_those_of_unbounded_queues(
    policy: PolicyName, graphs: bool, windows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several chunks that begin alike, in few pages: cached prefixes, preemption."""
    made = make_policy(policy, block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET)
    prompt = tuple(range(1, 40))
    requests = [
        Request((*prompt[: 13 * (1 + seed)], seed + 50), 8, SamplingParams(float(seed % 2), seed=seed))
        for seed in range(3)
    ]
    answers, most = [], []
    for rows in (10**6, 8):
        bound = few(monkeypatch, rows)
        runner = honest(windows)
        limits = Limits(3, 64, 4, 10, 28 * runner.layout.bytes_of(4).page)
        engine = Engine(runner, made, limits)
        if graphs:
            RecordedGraphs(rerun=True).guard(engine)
            runner.context._on_cpu = False
        found = noting_queues(engine)
        answers.append([sequence.answer for sequence in engine.generate(requests * 2)])
        most.append(max(found))
    assert answers[0] == answers[1]
    assert most[1] <= bound
    assert most[0] > most[1], "the first engine queues more than a queue of the second holds"


@pytest.mark.full
def test_a_long_run_with_small_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 5)
    seen = Soak(3, rerun=True).run(400)
    assert seen["preemptions"]
    assert seen["prefix hits"]
