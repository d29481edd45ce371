"""The checks of tests/plugins/kernels/, which run in Triton's interpreter and on a GPU, over executed PTX: kernels of
layers, of trees and branches, of the handover, from logits to tokens, of page writes and of mask packing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")

from tests.plugins.kernels import attention, branches, calls, choices, handover, layers, pages, trees
from tests.plugins.kernels.trees import specification, stable_topk
from tests.plugins.test_layer_ops import HQ
from tests.ptx.cases import CAPABILITIES
from tests.ptx.launch import Edit, Launch, executed_as_ptx
from tests.ptx.order import Fault
from tests.ptx.test_instructions import ELSEWHERE, TESTED

__all__ = ["specification", "stable_topk"]
#: Of FP8, which needs compute capability 8.9.
FP8 = {"test_heads_of_fp8_pages", "test_quantized_results", "test_fp8_pages"}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "DEVICE", "cpu")


def assert_of_tested_instructions(launches: list[Launch]) -> None:
    ran = {opcode for launch in launches for opcode in launch.counts}
    assert {opcode for opcode in ran if opcode.split(".")[0] not in ELSEWHERE} <= TESTED
    assert ran


@pytest.fixture(params=CAPABILITIES)
def as_ptx(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param < 89 and request.node.originalname in FP8:
        pytest.skip("FP8 needs compute capability 8.9")
    with executed_as_ptx(request.param) as launches:
        yield
    assert_of_tested_instructions(launches)


def checks_of(module: ModuleType) -> type:
    """Its tests as a class, for pytest to collect."""
    tests = {name: staticmethod(test) for name, test in vars(module).items() if name.startswith("test_")}
    marks = [pytest.mark.slow, pytest.mark.full, pytest.mark.usefixtures("as_ptx")]
    return type(module.__name__, (), {**tests, "pytestmark": marks})


TestLayers, TestTrees, TestBranches, TestChoices, TestPages, TestHandover = map(
    checks_of, (layers, trees, branches, choices, pages, handover)
)

#: What `make test` runs: one case of each kernel. Their names, the check, its arguments. Loops take several turns, or
#: the barrier at their end orders nothing.
SMALL: dict[str, tuple[Any, ...]] = {
    "norm": ("add_rms_norm", layers.test_norm, 1024, torch.bfloat16),
    "heads": ("qk_norm_rope", layers.test_heads, 1, HQ, True, True, torch.bfloat16),
    "gate": ("silu_mul", layers.test_gate, True, torch.bfloat16),
    "tables": ("rope_tables", layers.test_tables, torch.bfloat16),
    "quantized": ("quantize silu_mul add_rms_norm", layers.test_quantized_results),
    "mask": ("pack_mask", layers.test_masks_pack, 33),
    "chain": ("chain", trees.test_chain, 5),
    "merge": ("candidates", trees.test_candidates, 5, 6, 13, 2),
    "growth": ("grow", trees.test_growth, 2, 2, 2, 5, True),
    "sources": ("grow", trees.test_sources, 2, (2, 1, 1), (0, 0, 1), 5, True),
    "acceptance": ("accept", trees.test_acceptance, 5, 6, 13),
    "boundaries": ("boundaries", branches.test_boundaries, 4, 2),
    "blocks": ("blocks", branches.test_blocks, 5),
    "rejected": ("mask_rejected", branches.test_rejected_tokens, 63, torch.bfloat16),
    "branches": ("branches", branches.test_branches, 5, 3, 13, 2),
    "handover": ("begin end", handover.test_handover, 5, 3, 4),
    "noise": ("noise", choices.test_noise_keeps_its_digits_at_both_ends),
    "choice": ("threshold scores combine", choices.test_choice, 3, 63, choices.TOP),
    "drafts": ("segments pool", choices.test_candidates, 2, 63, 5, choices.GREEDY),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def run(name: str) -> None:
        _, check, *arguments = SMALL[name]
        more = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(check).parameters else {}
        check(*arguments, **more)

    return run


#: What ptxas may fuse.
FUSIBLE = re.compile(r"(add|sub|mul)\.(ftz\.)?(bf16|f16|f32)(x2)?")


@pytest.mark.parametrize("name", SMALL)
def test_a_small_case(name: str, small: Callable[[str], None]) -> None:
    with executed_as_ptx(90) as launches:
        small(name)
    assert_of_tested_instructions(launches)
    if SMALL[name][1] in vars(layers).values():  # they round as separate operators do
        assert not any(FUSIBLE.fullmatch(opcode) for launch in launches for opcode in launch.counts)
    assert {launch.name for launch in launches} == {f"{kernel}_kernel" for kernel in SMALL[name][0].split()}


@pytest.mark.parametrize("capability", [80, 90])
def test_attention_of_prompts(capability: int) -> None:
    """Chunks one behind the other; test_parity.py has trees, test_mutants.py what the barriers are for."""
    with executed_as_ptx(capability) as launches:
        attention.test_chunks_of_prompts((3, 18), (70, 33), 2, False)
    assert_of_tested_instructions(launches)
    assert {launch.name for launch in launches} == {"cascade_attention_kernel"}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("capability", "threads"), [(89, 256), (90, 128), (120, 256)])
def test_prompts_over_fp8_pages(capability: int, threads: int) -> None:
    """64 rows, with as many warps as keep their registers."""
    with executed_as_ptx(capability) as launches:
        attention.check_chunks((20, 3), (40, 33), 1, fp8=True, size=128)
    assert_of_tested_instructions(launches)
    assert f".reqntid {threads}" in launches[-1].ptx


def test_every_kernel_is_executed() -> None:
    """Here, in test_parity.py, or in test_batch_invariant.py."""
    sources = (path.read_text() for path in (Path(__file__).parents[2] / "plugins").glob("*/triton/*.py"))
    kernels = {kernel for source in sources for kernel in re.findall(r"^def (\w+)_kernel\(", source, re.MULTILINE)}
    elsewhere = {"cascade_attention", "write_pages", "linear", "attention", "key_order", "merge_splits"}
    assert kernels == elsewhere | {
        kernel for names, *_ in SMALL.values() for kernel in names.split() if kernel != "noise"
    }


def test_noise_needs_no_approximate_logarithm() -> None:
    """`lg2.approx` is taken as exact here, but next to 1 it has no digits."""
    with executed_as_ptx(90) as launches:
        choices.test_noise_keeps_its_digits_at_both_ends()
    assert not any(opcode.startswith("lg2") for launch in launches for opcode in launch.counts)


def without(ptx: str, left_out: int) -> Edit:
    """Leaves a line of this kernel out."""
    mutant = "\n".join(text for line, text in enumerate(ptx.splitlines()) if line != left_out)
    return lambda name, given: mutant if given == ptx else given


#: Whose threads share nothing, or are one warp.
WITHOUT_BARRIERS = {"heads", "tables", "quantized", "mask", "acceptance", "boundaries", "blocks", "rejected", "noise"}
WITHOUT_BARRIERS |= {"handover"}


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, capability, marks=[] if (name, capability) == ("merge", 90) else [slow, full])
        for slow, full in [(pytest.mark.slow, pytest.mark.full)]
        for capability in (80, 90)
        for name in SMALL
        if name not in WITHOUT_BARRIERS
    ],
)
def test_every_barrier_is_needed(name: str, capability: int, small: Callable[[str], None]) -> None:
    """Left out one at a time, each is a fault: warps meet in shared memory, those of trees in global memory too."""
    with executed_as_ptx(capability) as launches:
        small(name)
    barriers = [
        (launch.ptx, line)
        for launch in {launch.ptx: launch for launch in launches}.values()
        for line, text in enumerate(launch.ptx.splitlines())
        if text.strip().startswith("bar.sync")
    ]
    assert barriers
    for ptx, line in barriers:
        with pytest.raises(Fault, match="race: "), executed_as_ptx(capability, without(ptx, line)):
            small(name)
