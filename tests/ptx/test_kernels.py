"""The checks of tests/plugins/kernels/, which run in Triton's interpreter and on a GPU, over executed PTX: kernels of
layers, of trees, from logits to tokens, of page writes and of mask packing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")

from tests.plugins.kernels import calls, choices, layers, pages, trees
from tests.plugins.kernels.trees import specification, stable_topk
from tests.plugins.test_layer_ops import HQ, WIDTH
from tests.ptx.cases import CAPABILITIES
from tests.ptx.launch import executed_as_ptx

__all__ = ["specification", "stable_topk"]
#: Of FP8, which needs compute capability 8.9.
FP8 = {"test_heads_of_fp8_pages", "test_quantized_results", "test_fp8_pages"}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "DEVICE", "cpu")


@pytest.fixture(params=CAPABILITIES)
def as_ptx(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param < 89 and request.node.originalname in FP8:
        pytest.skip("FP8 needs compute capability 8.9")
    with executed_as_ptx(request.param) as launches:
        yield
    assert launches


def checks_of(module: ModuleType) -> type:
    """Its tests as a class, for pytest to collect."""
    tests = {name: staticmethod(test) for name, test in vars(module).items() if name.startswith("test_")}
    marks = [pytest.mark.slow, pytest.mark.full, pytest.mark.usefixtures("as_ptx")]
    return type(module.__name__, (), {**tests, "pytestmark": marks})


TestLayers, TestTrees, TestChoices, TestPages = map(checks_of, (layers, trees, choices, pages))

#: What `make test` runs: one case of each kernel.
SMALL: dict[str, tuple[Any, ...]] = {
    "norm": (layers.test_norm, WIDTH, torch.bfloat16),
    "heads": (layers.test_heads, 1, HQ, True, True, torch.bfloat16),
    "gate": (layers.test_gate, True, torch.bfloat16),
    "tables": (layers.test_tables, torch.bfloat16),
    "quantized": (layers.test_quantized_results,),
    "mask": (layers.test_masks_pack, 33),
    "chain": (trees.test_chain, 5),
    "merge": (trees.test_candidates, 5, 6, 13, 2),
    "growth": (trees.test_growth, 2, 2, 2, 5, True),
    "acceptance": (trees.test_acceptance, 5, 6, 13),
    "noise": (choices.test_words_are_those_of_the_specification, 2**63 - 1),
    "choice": (choices.test_choice, 2, 63, choices.TOP),
    "drafts": (choices.test_candidates, 2, 63, 5, choices.GREEDY),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, *arguments = SMALL[name]
    more = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(check).parameters else {}
    with executed_as_ptx(90):
        check(*arguments, **more)
