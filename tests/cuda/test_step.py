"""A decode step on CUDA, without a GPU: no copy to or from the host, no read, and how many launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.policies import NAMES, PolicyName
from tests.conftest import Once
from tests.cuda import guard
from tests.cuda.budget import DRAFTER_LAYERS, LAUNCHES, LAYERS
from tests.cuda.fake import GREEDY, HOT, NARROW, Watch, fake_gpu, steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def guarded(once: Once) -> None:
    guard.load(once("cuda-guard", guard.build))


@pytest.mark.parametrize("kinds", [(GREEDY,), (GREEDY, HOT, NARROW)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("policy", "fp8"),
    [
        pytest.param(name, fp8, marks=[] if fp8 == (name == "hybrid") else pytest.mark.full)
        for name in NAMES
        for fp8 in (False, True)
    ],
)
def test_nothing_leaves_the_device(policy: PolicyName, fp8: bool, kinds: Any) -> None:
    """Between the first draft and the end of commit."""
    watch = steps(policy, kinds, fp8=fp8, calibrated=True)
    assert watch.copies == []
    assert watch.launches.total() > 50


CONTROLS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "a mask as index": lambda x: x[x > 1],
    "a tensor of the CPU": lambda x: x + torch.arange(4),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_reads_are_refused(name: str) -> None:
    with fake_gpu(watch := Watch()), watch, pytest.raises(Exception, match=r"[Dd]ata.dependent|fake|device"):
        CONTROLS[name](torch.zeros(4, dtype=torch.long, device="cuda"))


@pytest.mark.parametrize("copy", [lambda: torch.ones(3, device="cuda").cpu(), lambda: torch.ones(3).to("cuda")])
def test_copies_are_reported(copy: Callable[[], object]) -> None:
    with fake_gpu(watch := Watch()), watch:
        copy()
    assert len(watch.copies) == 1


@pytest.mark.parametrize(
    ("policy", "fp8", "size"),
    [
        pytest.param(*case, size, marks=[] if (*case, size) == ("d2sd", False, 1) else pytest.mark.full)
        for case in LAUNCHES
        for size in (1, 8, 32)
    ],
)
def test_launches_stay_within_their_budget(policy: PolicyName, fp8: bool, size: int) -> None:
    watch = steps(policy, (GREEDY,), size=size, layers=LAYERS, drafter_layers=DRAFTER_LAYERS, fp8=fp8)
    budget = LAUNCHES[policy, fp8]
    over = {stage: (count, budget.get(stage, 0)) for stage, count in watch.launches.items() if count > budget.get(stage, 0)}
    assert not over, f"more launches than tests/cuda/budget.py allows: {over}"
