"""A decode step on CUDA, without a GPU: no copy to or from the host, no read, and how many launches.

Run by test_step.py in a process of its own, because the device guard stays loaded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")

from benchmarks.gpu.steps import Step, count
from d2sd.errors import D2SDError
from d2sd.modeling.config import ExpertsConfig
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.mixers.configs import DeltaConfig
from d2sd.modeling.where import Where
from d2sd.plugins.cascade_attention.triton import exact
from d2sd.policies import DrafterRole
from d2sd.runtime.drafting.window import Window
from d2sd.runtime.staging import Staging
from tests.cuda.budget import COPIES, DRAFTER_LAYERS, LAUNCHES, LAYERS, MOST
from tests.cuda.models import GREEDY, HOT, NARROW, runner, steps
from tests.tiny import CASES as EVERY
from tests.tiny import HEADS
from tools.cuda import guard
from tools.cuda.fake import Watch, fake_gpu

SAMPLED = GREEDY, HOT, NARROW
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def guarded() -> None:
    guard.load(Path(os.environ["D2SD_CUDA_GUARD"]))


#: Every policy once, and sampled where two passes draft; the rest of the product is `full`.
CASES = [
    pytest.param(
        name,
        fp8,
        kinds,
        id=f"{name}{'-fp8' * fp8}-{label}",
        marks=[]
        if fp8 == (name in ("hybrid", "off")) and (label == "greedy" or name in ("d2sd", "hybrid"))
        else pytest.mark.full,
    )
    for name in EVERY
    for fp8 in (False, True)
    for label, kinds in (("greedy", (GREEDY,)), ("sampled", SAMPLED))
]


@pytest.mark.parametrize(("policy", "fp8", "kinds"), CASES)
def test_nothing_leaves_the_device(policy: str, fp8: bool, kinds: Any) -> None:
    """Between the first draft and the end of commit."""
    watch = steps(policy, kinds, fp8=fp8, calibrated=True)
    assert watch.copies == []
    assert watch.launches.total() >= 30, "the kernels are counted"


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("policy", [pytest.param("chain", marks=pytest.mark.full), "hybrid"])
def test_heads_stay_on_the_device(policy: str, head: str) -> None:
    """Greedy and sampled requests of one batch; convolved layers are those of PyTorch."""
    watch = steps(policy, SAMPLED, calibrated=True, scored=HEADS[head])
    assert watch.copies == []
    assert watch.launches.total() > 30, "the kernels are counted"


CONTROLS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "a mask as index": lambda x: x[x > 1],
    "a tensor of the CPU": lambda x: x + torch.arange(4),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_reads_are_refused(name: str) -> None:
    with fake_gpu(watch := Watch()), watch, pytest.raises(Exception, match=r"_local_scalar_dense|nonzero|device"):
        CONTROLS[name](torch.zeros(4, dtype=torch.long, device="cuda"))


@pytest.mark.parametrize("copy", [lambda: torch.ones(3, device="cuda").cpu(), lambda: torch.ones(3).to("cuda")])
def test_copies_are_reported(copy: Callable[[], object]) -> None:
    with fake_gpu(watch := Watch()), watch:
        copy()
    assert len(watch.copies) == 1


@pytest.mark.parametrize("size", [1, pytest.param(8, marks=pytest.mark.full), pytest.param(32, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == ("d2sd", False, False) else pytest.mark.full) for case in LAUNCHES]
)
def test_launches_stay_within_their_budget(case: tuple[str, bool, bool], size: int) -> None:
    policy, fp8, sampled = case
    kinds = SAMPLED[::-1] if sampled else (GREEDY,)  # at batch 1, the one with all filters
    watch = steps(policy, kinds, size=size, layers=LAYERS, drafter_layers=DRAFTER_LAYERS, fp8=fp8)
    budget = Counter(LAUNCHES[case]) + Counter(COPIES.get(policy, {}) if size > 1 else {})
    over = {stage: count for stage, count in watch.launches.items() if count > budget.get(stage, 0)}
    assert not over, f"tests/cuda/budget.py allows {[(stage, budget.get(stage, 0)) for stage in over]}, found {over}"
    assert watch.launches.keys() == budget.keys()
    assert policy != "d2sd" or watch.launches.total() <= MOST[fp8]


@pytest.mark.parametrize("size", [1, 3])
def test_a_copy_is_a_launch_to_find_it_and_one_to_write_the_text(size: int) -> None:
    plain, copying = (steps("hybrid", (GREEDY,), size=size, lookup=lookup) for lookup in (False, True))
    assert copying.launches - plain.launches == Counter(lookup=1, commit=1)
    assert not plain.launches - copying.launches
    assert copying.copies == []


EXPERTS = ExpertsConfig(8, 2, 64, normalized=True)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("extra", "launches"), [({}, 20), ({"bias": True, "limit": 7.0}, 29)], ids=["Qwen3", "gpt-oss"]
)
def test_experts_are_launches_in_place_of_an_mlp(extra: dict[str, Any], launches: int, size: int) -> None:
    """Experts have static shapes and the host reads nothing, so that a graph captures them."""
    dense = steps("hybrid", (GREEDY,), size=size, layers=4)
    watch = steps("hybrid", (GREEDY,), size=size, layers=4, experts=replace(EXPERTS, dense_layers=(2,), **extra))
    assert watch.copies == []
    assert watch.launches - dense.launches == Counter(verify=3 * (launches - 3))
    assert not dense.launches - watch.launches


#: Qwen3.5's layers: three in four have a state.
DELTA = DeltaConfig((0, 1, 2, 4, 5, 6), key_heads=2, value_heads=8, key_size=16, value_size=16)
HYBRID: dict[str, Any] = {"recurrent": DELTA, "output_gate": True, "rotary_dim": 16, "norm_offset": True}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("fp8", [False, True])
def test_hybrids(fp8: bool, size: int) -> None:
    """A layer of either kind takes one launch more than one that attends, and a step three to commit states."""
    plain, watch = (steps("d2sd", (GREEDY,), size=size, layers=8, fp8=fp8, **more) for more in ({}, HYBRID))
    assert watch.copies == []
    assert watch.launches - plain.launches == Counter(verify=8, commit=3)
    assert not plain.launches - watch.launches


def test_batch_invariant_hybrids_stay_on_the_device() -> None:
    """The recurrence takes the place of the closed form."""
    watch, found = (steps("d2sd", (GREEDY,), layers=8, exact=exact, **HYBRID) for exact in (False, True))
    assert found.copies == []
    assert found.launches.keys() == watch.launches.keys()


def test_windows_and_sinks_are_no_launches_of_a_layer() -> None:
    """But one mask a window, for all layers of it."""
    found = [steps("hybrid", (GREEDY,), layers=n, windows=(8, None) * (n // 2), sinks=True) for n in (2, 4, 8)]
    assert all(watch.copies == [] for watch in found)
    more = [watch.launches["verify"] for watch in found]
    assert more[2] - more[1] == 2 * (more[1] - more[0]) == 4 * 9


@pytest.mark.parametrize(("capability", "dtype"), [((8, 9), torch.bfloat16), ((9, 0), torch.float16)])
def test_experts_without_grouped_products_are_gathered(capability: tuple[int, int], dtype: torch.dtype) -> None:
    with fake_gpu(watch := Watch(), capability):
        made = runner(2, 2, fp8=False, dtype=dtype, roles=(), experts=EXPERTS)
        hidden = torch.zeros(5, 64, dtype=dtype, device="cuda")
        layers: Any = made.target.compiled
        with watch:
            assert layers._layers[0].feed_forward(hidden).shape == (5, 64)
    assert watch.copies == []


def test_experts_are_not_exact() -> None:
    with fake_gpu(Watch()), pytest.raises(D2SDError, match="batch-invariant step needs fused layers"):
        runner(2, 2, fp8=False, roles=(), exact=True, experts=EXPERTS)


def test_a_window_of_the_context_stays_on_the_device() -> None:
    plain, windowed = (steps("hybrid", (GREEDY,), window=window) for window in (None, Window(1, 3)))
    assert windowed.copies == []
    more = windowed.launches - plain.launches
    assert more.keys() == {"draft_first", "draft_second"}
    assert max(more.values()) <= 11


@pytest.mark.parametrize(
    "policy", ["d2sd", *(pytest.param(name, marks=pytest.mark.full) for name in ("off", "chain", "hybrid"))]
)
def test_steps_on_the_meta_device_have_these_launches(policy: str) -> None:
    """Bytes are counted there (benchmarks/gpu/steps.py)."""
    fake = steps(policy, (GREEDY,), size=1, layers=LAYERS, drafter_layers=DRAFTER_LAYERS)
    assert Counter(launch.stage for launch in count(Step(policy))) == +fake.launches


@pytest.mark.parametrize(("layers", "changes", "each"), [(2, {}, 8), (8, HYBRID, 10)], ids=["dense", "hybrid"])
def test_prompts_of_any_number_are_one_pass(layers: int, changes: dict[str, Any], each: int) -> None:
    """Three prompts take as many launches as one, with one attention a layer; one copy goes in, none comes back."""
    found = []
    with fake_gpu(watch := Watch()):
        made = runner(layers, 2, fp8=False, roles=() if changes else tuple(DrafterRole), **changes)
        made.staging = Staging("cuda", lambda: lambda: None)
        made.allocate(PoolSizes(64, 16, states=4))
        for lengths in ([40], [40], [5, 70, 1]):
            tokens = torch.zeros(sum(lengths), dtype=torch.long)
            watch.launches.clear()
            watch.copies.clear()
            with watch:
                hidden, _ = made.prefill(tokens, lengths, Where.scratch(len(lengths), 8, states=bool(changes)))
            assert hidden.shape[0] == sum(lengths)
            found.append(watch.launches.total())
            assert watch.copies == ["aten.copy_.default in other"]
    assert found[1] == found[2] > layers * each
    assert found[1] < layers * (each + 1) + 30, "and a commit of inputs in gated delta nets"


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=pytest.mark.full)])
def test_batch_invariant_steps_take_as_many_launches(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of `exact` takes the place of another, but for those that its attention leaves over: the merge of
    splits and, in FP8, the quantisation of the result. Nothing leaves the device.
    """
    monkeypatch.setattr(exact, "SPAN", 128)  # several splits: with one there is no merge
    found = steps("d2sd", (GREEDY,), layers=LAYERS, drafter_layers=DRAFTER_LAYERS, fp8=fp8, exact=True)
    left_over = Counter(verify=LAYERS * (2 if fp8 else 1))
    assert not found.launches - (Counter(LAUNCHES["d2sd", fp8, False]) + Counter(COPIES["d2sd"]) + left_over)
    assert found.copies == []
