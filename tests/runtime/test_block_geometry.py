"""Drafters whose blocks differ: in size, from what they were trained with, in what the anchor's row predicts, and in
what their rows see.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.where import Where
from d2sd.plugins.trees import Branches
from d2sd.policies import FACTS, DrafterRole, FirstPass, PolicyName
from d2sd.runtime.batch import Batch
from d2sd.runtime.decode import draft_trees
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.choosing import chosen
from tests.runtime.cheating import CheatingRunner
from tests.runtime.cuda_graphs.test_capture import check_same, layers_of_pytorch, record
from tests.runtime.helpers import (
    BLOCK,
    choices,
    expected,
    make_engine,
    models,
    run_staggered,
    some_requests,
    sync_drafters,
)
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.runtime.test_model_runner import PAGE, TABLE, TEXTS, fresh_draft
from tests.tiny import runner_of, tiny_drafter

__all__ = ["layers_of_pytorch"]  # a fixture

SLOTS = BLOCK - 1
FIRST, SECOND, *_ = DrafterRole
SHIFTED = {"sample_from_anchor": True}
CAUSAL = {"attention": {"causal": (True,)}}


@dataclass(frozen=True)
class Geometry:
    """The blocks of two drafters, and how many drafts each gives where a step commits up to BLOCK tokens."""

    first: Mapping[str, Any]
    second: Mapping[str, Any]
    drafts: tuple[int, int] = (SLOTS, SLOTS)

    @property
    def drafters(self) -> tuple[Drafter, Drafter]:
        target = models()[0].config
        first = tiny_drafter(target, **{"layers": 1, **self.first})
        return first, tiny_drafter(target, role="variable_prefix", seed=2, **{"layers": 1, **self.second})


GEOMETRIES = {
    "both shifted": Geometry({"block_size": SLOTS} | SHIFTED, {"block_size": SLOTS} | SHIFTED),
    "first shifted": Geometry({"block_size": SLOTS} | SHIFTED, {"block_size": BLOCK}),
    "second shifted": Geometry({"block_size": BLOCK}, {"block_size": SLOTS} | SHIFTED),
    "cut": Geometry({"block_size": 9}, {"block_size": 7}),
    "cut and shifted": Geometry({"block_size": 16} | SHIFTED, {"block_size": BLOCK} | SHIFTED),
    "first smaller": Geometry({"block_size": 3}, {"block_size": BLOCK}, (2, SLOTS)),
    "second smaller": Geometry({"block_size": BLOCK}, {"block_size": 3}, (SLOTS, 2)),
    "second smaller and shifted": Geometry({"block_size": 9}, {"block_size": 2} | SHIFTED, (SLOTS, 2)),
    "windows": Geometry(
        {"block_size": BLOCK, "layers": 2, "attention": {"windows": (6, None), "causal": (True, False)}},
        {"block_size": SLOTS, "attention": {"windows": (5,), "sinks": True}, "mask_embedding": True} | SHIFTED,
    ),
    "causal": Geometry({"block_size": BLOCK} | CAUSAL, {"block_size": BLOCK} | CAUSAL),
    "one draft": Geometry({"block_size": 1} | SHIFTED, {"block_size": BLOCK}, (1, SLOTS)),
}


def prefilled(drafters: tuple[Drafter, Drafter]) -> tuple[ModelRunner, Batch]:
    """A sampled request a text."""
    runner = runner_of(deepcopy(models()[0]), *deepcopy(drafters), block_size=BLOCK)
    runner.allocate(PoolSizes(10, PAGE))
    for row, text in enumerate(TEXTS):
        runner.prefill(torch.tensor(text[:-1]), [len(text) - 1], Where(TABLE[row : row + 1], torch.tensor([0])))
    sync_drafters(runner)
    params = [SamplingParams(temperature=0.8, top_k=9, seed=seed) for seed in (1, 2**63 + 2, 3)]
    context = torch.tensor([len(text) - 1 for text in TEXTS])
    active, sampling = torch.ones(len(TEXTS), dtype=torch.bool), Sampling.of(params, runner.vocab_size, "cpu")
    return runner, Batch(torch.tensor([text[-1] for text in TEXTS]), Where(TABLE, context), active, sampling)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_drafts_equal_drafting_from_nothing(geometry: Geometry) -> None:
    """Slot by slot, with the noise of its position; the slots that a block lacks propose nothing."""
    first_drafter, second_drafter = geometry.drafters
    runner, batch = prefilled((first_drafter, second_drafter))
    assert runner.block_size == BLOCK
    most_first, most_second = geometry.drafts
    first = runner.draft_first(batch, 2)
    lengths = torch.tensor([[0, 2, SLOTS], [1, 3, 0], [SLOTS, 1, 2]])
    rejected = first.top1.gather(1, lengths.clamp(max=SLOTS - 1)).where(lengths < SLOTS, -1)
    kept = first.top1[:, None].expand(-1, 3, -1)
    second = runner.draft_second(batch, Branches(kept, lengths, rejected), SECOND, 2)
    assert first.tokens.shape == (3, SLOTS, 2)
    assert second.tokens.shape == (3, 3, SLOTS, 2)
    for draft, drafts in ((first, most_first), (second, most_second)):
        assert draft.logprob[..., :drafts, :].isfinite().all()
        assert (draft.logprob[..., drafts:, :] == -torch.inf).all()

    def check(drafter: Drafter, drafts: int, row: int, prefix: list[int], rejected: int, found: list[int]) -> None:
        rows = drafts if drafter.config.sample_from_anchor else drafts + 1
        text, place = TEXTS[row], batch.where.context_len[row : row + 1]
        block = [text[-1], *prefix[: rows - 1]]
        block += [drafter.config.mask_token_id] * (rows - len(block))
        logits = fresh_draft(drafter, text, [block])
        if rejected >= 0 and len(prefix) < drafts:
            logits[0, len(prefix), rejected] = -torch.inf
        own = Sampling.of([SamplingParams(temperature=0.8, top_k=9, seed=[1, 2**63 + 2, 3][row])], 64, "cpu")
        told = choices(logits, torch.arange(drafts)[None], place, drafts, own)[0]
        assert found[len(prefix) : drafts] == told[len(prefix) :].tolist()

    for row in range(3):
        check(first_drafter, most_first, row, [], -1, first.top1[row].tolist())
        for branch, length in enumerate(lengths[row].tolist()):
            told = second.top1[row, branch].tolist()
            check(second_drafter, most_second, row, first.top1[row, :length].tolist(), int(rejected[row, branch]), told)


POLICIES = tuple(name for name, facts in FACTS.items() if facts.first_pass is FirstPass.DRAFTER)
SAMPLED = {(name, policy) for policy in POLICIES for name in chosen(policy, GEOMETRIES, 2)}


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("geometry", "policy"),
    [
        pytest.param(one, policy, id=f"{name}-{policy}", marks=[] if (name, policy) in SAMPLED else pytest.mark.slow)
        for name, one in GEOMETRIES.items()
        for policy in POLICIES
    ],
)
def test_the_text_is_the_targets_own(geometry: Geometry, policy: PolicyName) -> None:
    """Greedy and sampled, in flight and preempted; every draft that a block has is accepted at times."""
    requests = some_requests()
    texts = {r.seed: r.prompt + tuple(_longer(r)) for r in requests}
    runner = CheatingRunner(deepcopy(models()[0]), *geometry.drafters, texts, block_size=BLOCK)
    engine = make_engine(runner, policy, pages=16, max_batch=4)
    sequences = run_staggered(engine, requests, gap=2)
    assert [s.answer for s in sequences] == [expected(r) for r in requests]
    lengths = {length for s in sequences for length in s.stats.accepted}
    roles = FACTS[policy].drafters
    first, second = (geometry.drafts[0], geometry.drafts[1] if SECOND in roles else 0)
    if FACTS[policy].second_pass is not None and SECOND not in roles:
        second = first
    assert max(lengths) == 1 + max(first, second)


def _longer(request: Any) -> list[int]:
    return expected(replace(request, max_new_tokens=request.max_new_tokens + BLOCK))


def test_a_step_without_a_slot_left_restarts_where_there_is_one() -> None:
    """A boundary past the second block would take the first drafter's tokens away and give none."""
    geometry = GEOMETRIES["second smaller"]
    runner, batch = prefilled(geometry.drafters)
    engine = make_engine(runner, "hybrid", max_batch=4)
    runner.allocate(PoolSizes(10, PAGE))
    for row, text in enumerate(TEXTS):
        runner.prefill(torch.tensor(text[:-1]), [len(text) - 1], Where(TABLE[row : row + 1], torch.tensor([0])))
    sync_drafters(runner)
    drafted = draft_trees(runner, engine.policy, batch)
    assert drafted.branches is not None
    lengths = drafted.branches.prefix_len
    assert ((lengths < 2) | (lengths == SLOTS)).all()
    assert (lengths < 2).any()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [name for name in POLICIES if FACTS[name].copies])
@pytest.mark.parametrize("name", ["windows", "causal", "cut and shifted", "second smaller"])
def test_copies_and_shared_prefixes_beside_them(name: str, policy: PolicyName) -> None:
    """The second half of the requests begins as the first did, in pages that are still there."""
    requests = some_requests()[:5]
    again = [replace(r, sampling=replace(r.sampling, seed=1000 + n)) for n, r in enumerate(requests)]
    texts = {r.seed: r.prompt + tuple(_longer(r)) for r in (*requests, *again)}
    runner = CheatingRunner(deepcopy(models()[0]), *GEOMETRIES[name].drafters, texts, block_size=BLOCK)
    engine = make_engine(runner, policy, max_batch=4, lookup=True)
    for some in (requests, again):
        sequences = run_staggered(engine, some, gap=1)
        assert [s.answer for s in sequences] == [expected(r) for r in some]
    assert sum(s.stats.cached_tokens for s in sequences) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("layers_of_pytorch")
@pytest.mark.parametrize("policy", ["chain", "d2sd", "hybrid"])
@pytest.mark.parametrize("name", ["windows", "second smaller and shifted"])
def test_steps_can_be_graphs(name: str, policy: PolicyName) -> None:
    """Recorded operators that are repeated, in memory that is overwritten between two steps."""
    requests = some_requests()
    runner = runner_of(deepcopy(models()[0]), *deepcopy(GEOMETRIES[name].drafters), block_size=BLOCK)
    engine, graphs = make_engine(runner, policy, max_batch=4), RecordedGraphs()
    sequences = run_staggered(graphs.guard(engine), requests, gap=2)
    assert [s.answer for s in sequences] == [expected(r) for r in requests]
    assert graphs.replays > 10


@pytest.mark.usefixtures("layers_of_pytorch")
@pytest.mark.parametrize("policy", ["d2sd", "hybrid"])
@pytest.mark.parametrize("name", ["windows", "first smaller"])
def test_nothing_is_read_back(name: str, policy: PolicyName) -> None:
    """Every step runs the same operators on the same shapes."""
    runner = runner_of(deepcopy(models()[0]), *deepcopy(GEOMETRIES[name].drafters), block_size=BLOCK)
    engine = make_engine(runner, policy, max_batch=3, page_size=64, pages=6)
    runner.static_shapes = True  # as on CUDA
    for row, temperature in enumerate((0.0, 1.0, 0.7)):
        engine.submit(Request((row + 1, 7, 2 * row), 30, SamplingParams(temperature=temperature, seed=row)))
    check_same(record(engine, 3))
