"""A target with FP8 K/V is served from E4M3 pages, with the answers of the same model over pages in its own dtype."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import pytest
import torch

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.policies import PolicyName
from d2sd.runtime import pools
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.policy import make_policy
from tests.modeling.test_fp8 import fp8_decoder
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET, some_requests
from tests.tiny import runner_of, tiny_drafter


def answers(policy: PolicyName, dtype: torch.dtype) -> tuple[torch.dtype, list[list[int]], list[Counter[int]]]:
    """Type of the target's pages, answers, and how many steps committed how many tokens."""
    target = fp8_decoder(cache=True, dtype=dtype)
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1)
    second = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix", seed=2)
    drafters: list[Drafter] = [deepcopy(d).to(dtype) for d in (first, second)]
    runner = runner_of(target, *drafters)
    made = make_policy(policy, block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET)
    engine = Engine(runner, made, Limits(max_batch=4, max_context=64, page_size=4, prefill_chunk=8))
    sequences = engine.generate(some_requests())
    assert {pool.k.dtype for pool in runner.pools[1:]} == {dtype}, "drafters keep their own dtype"
    stored = runner.pools[0].k.dtype
    return stored, [s.answer for s in sequences], [s.stats.accepted for s in sequences]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["off", "hybrid"])
def test_e4m3_pages_give_the_responses_of_unquantized_pages(
    policy: PolicyName, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, *found = answers(policy, dtype)
    assert stored == torch.float8_e4m3fn
    monkeypatch.setattr(pools, "kv_scales", lambda model: None)
    stored, *expected = answers(policy, dtype)
    assert stored == dtype
    assert found == expected
