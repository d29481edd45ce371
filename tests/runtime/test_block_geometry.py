"""Drafters whose blocks differ: in size, from what they were trained with, in what the anchor's row predicts, and in
what their rows see.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.plugins.trees import Branches
from d2sd.policies import FACTS, DrafterRole, FirstPass, PolicyName
from d2sd.runtime.batch import Batch
from d2sd.runtime.decode import draft_trees
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.configurations import BLOCKS
from tests.runtime.cuda_graphs.test_capture import GREEDY, HOT, NARROW, check_same, record, running
from tests.runtime.helpers import BLOCK, choices, make_engine, models, sync_drafters
from tests.runtime.test_model_runner import PAGE, TEXTS, batch_of, fresh_draft, prefill
from tests.tiny import runner_of, tiny_drafter

SLOTS = BLOCK - 1
FIRST, SECOND, *_ = DrafterRole
#: A sampled request a text.
PARAMS = [SamplingParams(temperature=0.8, top_k=9, seed=seed) for seed in (1, 2**63 + 2, 3)]
SHIFTED = {"sample_from_anchor": True}
CAUSAL = {"attention": {"causal": (True,)}}


#: Those of configurations.py, and drafters that see windows, or rows behind one alone.
GEOMETRIES = BLOCKS | {
    "windows": (
        {"block_size": BLOCK, "layers": 2, "attention": {"windows": (6, None), "causal": (True, False)}},
        {"block_size": SLOTS, "attention": {"windows": (5,), "sinks": True}, "mask_embedding": True} | SHIFTED,
    ),
    "causal": ({"block_size": BLOCK} | CAUSAL, {"block_size": BLOCK} | CAUSAL),
}
#: How many drafts each drafter gives where a step commits up to BLOCK tokens, but for SLOTS of both.
DRAFTS = {
    "first smaller": (2, SLOTS),
    "second smaller": (SLOTS, 2),
    "second smaller and shifted": (SLOTS, 2),
    "one draft": (1, SLOTS),
}


def drafters(geometry: str) -> tuple[Drafter, Drafter]:
    first, second = ({"layers": 1, **shape} for shape in GEOMETRIES[geometry])
    target = models()[0].config
    return tiny_drafter(target, **first), tiny_drafter(target, role="variable_prefix", seed=2, **second)


def prefilled(pair: tuple[Drafter, Drafter]) -> tuple[ModelRunner, Batch]:
    runner = runner_of(deepcopy(models()[0]), *deepcopy(pair), block_size=BLOCK)
    runner.allocate(PoolSizes(10, PAGE))
    prefill(runner)
    sync_drafters(runner)
    return runner, batch_of(runner, PARAMS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_drafts_equal_drafting_from_nothing(geometry: str) -> None:
    """Slot by slot, with the noise of its position; the slots that a block lacks propose nothing."""
    first_drafter, second_drafter = drafters(geometry)
    runner, batch = prefilled((first_drafter, second_drafter))
    assert runner.block_size == BLOCK
    most_first, most_second = DRAFTS.get(geometry, (SLOTS, SLOTS))
    first = runner.drafts.first(batch, 2)
    lengths = torch.tensor([[0, 2, SLOTS], [1, 3, 0], [SLOTS, 1, 2]])
    rejected = first.top1.gather(1, lengths.clamp(max=SLOTS - 1)).where(lengths < SLOTS, -1)
    kept = first.top1[:, None].expand(-1, 3, -1)
    second = runner.drafts.second(batch, Branches(kept, lengths, rejected), SECOND, 2)
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
        own = Sampling.of([PARAMS[row]], 64, "cpu")
        told = choices(logits, torch.arange(drafts)[None], place, drafts, own)[0]
        assert found[len(prefix) : drafts] == told[len(prefix) :].tolist()

    for row in range(3):
        check(first_drafter, most_first, row, [], -1, first.top1[row].tolist())
        for branch, length in enumerate(lengths[row].tolist()):
            told = second.top1[row, branch].tolist()
            check(second_drafter, most_second, row, first.top1[row, :length].tolist(), int(rejected[row, branch]), told)


POLICIES = tuple(name for name, facts in FACTS.items() if facts.first_pass is FirstPass.DRAFTER)


def test_a_step_without_a_slot_left_restarts_where_there_is_one() -> None:
    """A boundary past the second block would take the first drafter's tokens away and give none."""
    runner, batch = prefilled(drafters("second smaller"))
    engine = make_engine(runner, "hybrid", max_batch=4)
    runner.allocate(PoolSizes(10, PAGE))
    prefill(runner)
    sync_drafters(runner)
    drafted = draft_trees(runner, engine.policy, batch)
    assert drafted.branches is not None
    lengths = drafted.branches.prefix_len
    assert ((lengths < 2) | (lengths == SLOTS)).all()
    assert (lengths < 2).any()


@pytest.mark.usefixtures("layers_of_pytorch")
@pytest.mark.parametrize("policy", ["d2sd", "hybrid"])
@pytest.mark.parametrize("name", ["windows", "first smaller"])
def test_nothing_is_read_back(name: str, policy: PolicyName) -> None:
    """Every step runs the same operators on the same shapes."""
    runner = runner_of(deepcopy(models()[0]), *drafters(name), block_size=BLOCK)
    check_same(record(running(policy, GREEDY, HOT, NARROW, batch=3, runner=runner), 3))
