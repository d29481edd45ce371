"""Speculation over published quantized targets writes the text of plain decoding, on the CPU's carried products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from d2sd.convert.checkpoint.target import load_target
from d2sd.policies import PolicyName
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.policy import make_policy
from tests.convert.checkpoint.published import SERVED, Published
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET, some_requests
from tests.tiny import runner_of, tiny_drafter

#: The others are for changes of a scheme: pytest -m full.
SAMPLED = ("fp8-blocks", "nvfp4-compressed")


def answers(folder: Path, policy: PolicyName, dtype: torch.dtype) -> list[list[int]]:
    target = load_target(folder, dtype)
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1).to(dtype)
    second = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix", seed=2).to(dtype)
    made = make_policy(policy, block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET)
    runner = runner_of(target, first, second)
    engine = Engine(runner, made, Limits(max_batch=4, max_context=64, page_size=4, prefill_chunk=8))
    return [sequence.answer for sequence in engine.generate(some_requests()[:5])]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=layout.name, marks=() if layout.name in SAMPLED else pytest.mark.full)
        for layout in SERVED
    ],
)
def test_speculation_equals_plain_decoding(layout: Published, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = layout.write(tmp_path)
    expected = answers(folder, "off", dtype)
    assert len({tuple(answer) for answer in expected}) == 5
    assert answers(folder, "hybrid", dtype) == expected
