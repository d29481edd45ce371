"""The checks of tests/plugins/kernels/, which run in Triton's interpreter and on a GPU, over executed PTX: kernels of
layers, of trees and branches, of the handover, from logits to tokens, of page writes and of mask packing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from tests.plugins.cases import checks, kernels
from tests.plugins.kernels import attention, calls, choices
from tests.plugins.kernels.trees import specification, stable_topk
from tests.ptx.cases import CAPABILITIES
from tools.ptxsim.launch import Edit, Launch, executed_as_ptx
from tools.ptxsim.order import Fault
from tools.ptxsim.tests.test_instructions import ELSEWHERE, TESTED

__all__ = ["specification", "stable_topk"]
#: Of FP8, which needs compute capability 8.9; the last where it is asked to.
FP8 = {"test_heads_of_fp8_pages", "test_quantized_results", "test_fp8_pages", "test_heads_of_context"}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "DEVICE", "cpu")


def assert_of_tested_instructions(launches: list[Launch]) -> None:
    ran = {opcode for launch in launches for opcode in launch.counts}
    assert {opcode for opcode in ran if opcode.split(".")[0] not in ELSEWHERE} <= TESTED
    assert ran


@pytest.fixture(params=CAPABILITIES)
def as_ptx(request: pytest.FixtureRequest) -> Iterator[None]:
    asked = request.node.callspec.params.get("fp8", True)
    if request.param < 89 and request.node.originalname in FP8 and asked:
        pytest.skip("FP8 needs compute capability 8.9")
    with executed_as_ptx(request.param) as launches:
        yield
    assert_of_tested_instructions(launches)


def checks_of(module: ModuleType) -> type:
    """The module's tests as a class, for pytest to collect."""
    tests = {name: staticmethod(test) for name, test in vars(module).items() if name.startswith("test_")}
    marks = [pytest.mark.slow, pytest.mark.full, pytest.mark.usefixtures("as_ptx")]
    return type(module.__name__, (), {**tests, "pytestmark": marks})


for module in dict.fromkeys(check.module for check in checks().values()):
    globals()[f"Test{module.__name__.split('.')[-1].capitalize()}"] = checks_of(module)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: checks()[name].run(monkeypatch=monkeypatch)


#: What ptxas may fuse.
FUSIBLE = re.compile(r"(add|sub|mul)\.(ftz\.)?(bf16|f16|f32)(x2)?")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", checks())
def test_a_small_case(name: str, small: Callable[[str], None]) -> None:
    with executed_as_ptx(90) as launches:
        small(name)
    assert_of_tested_instructions(launches)
    if checks()[name].test.startswith(("layers.", "gated_layers.")):  # they round as separate operators do
        assert not any(FUSIBLE.fullmatch(opcode) for launch in launches for opcode in launch.counts)
    assert {launch.name for launch in launches} == {f"{kernel}_kernel" for kernel in checks()[name].kernels.split()}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_attention_of_prompts(capability: int) -> None:
    """Chunks one behind the other; test_parity.py has trees, test_mutants.py what the barriers are for."""
    with executed_as_ptx(capability) as launches:
        attention.test_chunks_of_prompts((3, 18), (70, 33), 2, False)
    assert_of_tested_instructions(launches)
    assert {launch.name for launch in launches} == {"cascade_attention_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "window"), [(90, 20), *(pytest.param(80, window, marks=pytest.mark.full) for window in (1, 9, 60))]
)
def test_prompts_behind_windows(capability: int, window: int) -> None:
    with executed_as_ptx(capability) as launches:
        attention.check_chunks((3, 40), (70, 33), 2, fp8=False, window=window, sinks=True)
    assert_of_tested_instructions(launches)


@pytest.mark.slow
def test_prompts_of_a_graph() -> None:
    with executed_as_ptx(90) as launches:
        attention.test_chunks_that_only_the_device_knows(4, 20)
    assert_of_tested_instructions(launches)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("capability", [89, 90, 120])
def test_prompts_over_fp8_pages(capability: int) -> None:
    """64 rows, with the eight warps that keep their registers."""
    with executed_as_ptx(capability) as launches:
        attention.check_chunks((20, 3), (40, 33), 1, fp8=True, size=128)
    assert_of_tested_instructions(launches)
    assert ".reqntid 256" in launches[-1].ptx


def test_every_kernel_is_executed() -> None:
    """Here, in test_parity.py, or in test_batch_invariant.py."""
    executed = {f"{kernel}_kernel" for check in checks().values() for kernel in check.kernels.split()}
    elsewhere = {"cascade_attention", "linear", "attention", "key_order", "merge_splits"}
    assert set(kernels()) == executed - {"noise_kernel"} | {f"{kernel}_kernel" for kernel in elsewhere}


def test_noise_needs_no_approximate_logarithm() -> None:
    """`lg2.approx` is taken as exact here, but next to 1 it has no digits."""
    with executed_as_ptx(90) as launches:
        choices.test_noise_keeps_its_digits_at_both_ends()
    assert not any(opcode.startswith("lg2") for launch in launches for opcode in launch.counts)


def without(ptx: str, left_out: int) -> Edit:
    """Leaves a line of this kernel out."""
    mutant = "\n".join(text for line, text in enumerate(ptx.splitlines()) if line != left_out)
    return lambda name, given: mutant if given == ptx else given


#: Barriers that order nothing which others do not: the compiler looks at addresses, not at warps.
SPARE = {
    ("drafts", 80): 2,
    ("drafts", 90): 2,
    ("tree rule", 80): 2,
    ("tree rule", 90): 1,
    ("tree rule of tiles", 80): 1,
    ("tree rule of tiles", 90): 2,
    ("exact tree rule", 80): 1,
    ("exact tree rule", 90): 1,
    ("chunk rule", 90): 1,
}


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, capability, marks=[] if (name, capability) == ("merge", 90) else [slow, full])
        for slow, full in [(pytest.mark.slow, pytest.mark.full)]
        for capability in (80, 90)
        for name, check in checks().items()
        if check.barriers
    ],
)
def test_every_barrier_is_needed(name: str, capability: int, small: Callable[[str], None]) -> None:
    """Left out one at a time, each is a fault: warps meet in shared memory, those of trees in global memory too. All
    results are right without those of `SPARE`.
    """
    with executed_as_ptx(capability) as launches:
        small(name)
    barriers = [
        (launch.ptx, line)
        for launch in {launch.ptx: launch for launch in launches}.values()
        for line, text in enumerate(launch.ptx.splitlines())
        if text.strip().startswith("bar.sync")
    ]
    assert barriers
    spare = []
    for ptx, line in barriers:
        try:
            with executed_as_ptx(capability, without(ptx, line)):
                small(name)
        except Fault as fault:
            assert "race: " in str(fault)  # noqa: PT017, a fault is what most of them are
        else:
            spare.append(line)
    assert len(spare) == SPARE.get((name, capability), 0), spare
