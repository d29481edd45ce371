"""Whole answers with attention and page writes executed as Hopper's PTX: the tokens of the CPU's reference."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.kv_pool import KVPool
from d2sd.policies import PolicyName
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from tests.plugins.on_kernels import run_kernels
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET
from tests.tiny import runner_of, tiny_decoder, tiny_drafter, tiny_flex
from tools.ptxsim.launch import executed_as_ptx

#: Seeds without a near tie, which bf16 may decide otherwise in another order of sums.
KINDS = SamplingParams(), SamplingParams(temperature=1.0, seed=4), SamplingParams(temperature=0.7, top_p=0.95, seed=2)
REQUESTS = [
    Request(tuple((7 * place + 3 * number) % 60 for place in range(length)), 16, KINDS[number])
    for number, length in enumerate((40, 3, 17))
]


@pytest.fixture(autouse=True)
def layers_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled layers of a CPU have an attention of their own."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))


def answers(policy: PolicyName, dtype: torch.dtype, *, windows: bool = False) -> list[list[int]]:
    """GQA 4:1: prompts and trees of 14 rows take the tile of 64 rows, and with it wgmma.

    `windows`: of a page and more, behind which pages are freed, in one layer of the target, with sinks, and in the
    drafters.
    """
    narrow: dict[str, Any] = {"windows": (None, 17), "sinks": True} if windows else {}
    target = tiny_decoder("qwen3", layers=2, heads=4, kv_heads=1, head_dim=16, **narrow).to(dtype)
    shape: dict[str, Any] = {"block_size": BLOCK, "layers": 1, "attention": {"windows": (9,)} if windows else {}}
    drafters: tuple[DraftModel, ...] = (
        tiny_drafter(target.config, **shape).to(dtype),
        tiny_drafter(target.config, **shape, role="variable_prefix", seed=2).to(dtype),
    )
    if policy == "flex_parallel":  # mask rows join in the second layer
        drafters = (tiny_flex(target, block_size=BLOCK).to(dtype),)
    made = make_policy(policy, block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET)
    limits = Limits(4, max_context=256, page_size=16, prefill_chunk=32)
    engine = Engine(runner_of(target, *drafters), made, limits)
    return [sequence.answer for sequence in engine.generate(deepcopy(REQUESTS))]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("policy", "dtype", "capability", "windows"),
    [
        pytest.param("d2sd", torch.bfloat16, 90, False),
        pytest.param("d2sd", torch.bfloat16, 90, True, marks=pytest.mark.full),
        pytest.param("hybrid", torch.float32, 80, True, marks=pytest.mark.full),
        pytest.param("flex_parallel", torch.float32, 80, False, marks=pytest.mark.full),
        *(
            pytest.param(policy, dtype, capability, False, marks=pytest.mark.full)
            for policy, dtype in (("d2sd", torch.bfloat16), ("hybrid", torch.float16), ("d2sd", torch.float32))
            for capability in (90, 80, 89, 120)
            if (policy, dtype, capability) != ("d2sd", torch.bfloat16, 90)
        ),
    ],
)
def test_answers_are_the_cpus(
    policy: PolicyName, dtype: torch.dtype, capability: int, windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Layers that are not compiled ask for `exact` on a CPU. As on a GPU, they do not here.
    attend = KVPool.attend
    monkeypatch.setattr(KVPool, "attend", lambda pool, rows, *, exact=False, mask=None: attend(pool, rows, mask=mask))
    expected = answers(policy, dtype, windows=windows)
    run_kernels(monkeypatch, "cascade_attention", "kv_pages")
    with executed_as_ptx(capability) as launches:
        found = answers(policy, dtype, windows=windows)
    assert found == expected
    assert all(len(answer) == 16 for answer in found)
    counts = sum((launch.counts for launch in launches), Counter[str]())
    names = Counter(launch.name for launch in launches)
    assert names["cascade_attention_kernel"] > 20
    assert names["write_pages_kernel"] > 10
    wgmma = sum(count for name, count in counts.items() if name.startswith("wgmma.mma_async"))
    assert bool(wgmma) == (capability == 90 and dtype != torch.float32)
