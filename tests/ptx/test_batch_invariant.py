"""The batch-invariant kernels, executed as PTX: right, and the same bits for a row alone and among others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.plugins.cascade_attention.triton import exact
from d2sd.plugins.layer_ops import linear
from tests.plugins.batch_invariance import Text, attended, check_broken_rows, check_rows_alone, numbers
from tests.plugins.kernels import calls
from tests.plugins.kernels.calls import assert_within_budget, in_fp8, read_back
from tests.plugins.test_cascade_attention import Call, Shape, ancestors, causal, make
from tests.ptx.cases import CAPABILITIES
from tools.ptxsim.launch import executed_as_ptx

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: (capability, type): what `make test` runs, what CI runs in addition, and all.
SMALL = [(90, "bf16")]
MIDDLE = [(80, "bf16"), (89, "fp16"), (120, "bf16"), (120, "fp32")]
ALL = [(capability, kind) for capability in CAPABILITIES for kind in TYPES]
CASES = [
    pytest.param(
        *case,
        id=f"{case[0]}-{case[1]}",
        marks=[] if case in SMALL else [pytest.mark.slow] if case in MIDDLE else [pytest.mark.slow, pytest.mark.full],
    )
    for case in ALL
]


pytestmark = pytest.mark.usefixtures("short_splits")


def sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Not rounded to 16 bits, which would hide most differences."""
    return linear.triton(x, weight, bias, None, torch.float32)


def check_linear(capability: int, dtype: torch.dtype) -> None:
    """More rows than a tile has; inputs and outputs that no tile divides."""
    x, weight, bias = numbers(67, 150).to(dtype), numbers(33, 150, seed=1).to(dtype), numbers(33, seed=2)
    with executed_as_ptx(capability) as launches:
        found = sums(x, weight, bias)
        check_rows_alone(sums, x, weight, bias, (1, 7, 16, 64))
    torch.testing.assert_close(found, linear.reference(x, weight, bias, None, torch.float32))
    assert len({launch.ptx for launch in launches}) == 1, "one kernel, whatever the number of rows"
    kinds = {name.split(".")[0] for name in launches[0].counts if name.startswith(("mma", "wgmma.mma"))}
    assert kinds == (set() if dtype == torch.float32 else {"wgmma" if capability == 90 else "mma"})


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "kind"), CASES)
def test_a_row_of_a_product(capability: int, kind: str) -> None:
    check_linear(capability, TYPES[kind])


def check_attention(capability: int, dtype: torch.dtype) -> None:
    """Over the end of a tile and of a split."""
    with executed_as_ptx(capability):
        for contexts, tree in (((60, 3), True), ((122,), True), ((30,), False)):
            shape = Shape(contexts=contexts, rows=9, kv_heads=1, group=4, size=16, page_size=16)
            Text.of(shape, dtype, tree=tree).check([8], spare=5)


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        pytest.param(
            *case.values, marks=[pytest.mark.slow, *([] if case.values == (90, "bf16") else [pytest.mark.full])]
        )
        for case in CASES
    ],
)
def test_a_row_behind_a_window(capability: int, kind: str) -> None:
    """Windows end among the rows of a tree, in a tile, and in a split behind the first; with sinks."""
    with executed_as_ptx(capability):
        for contexts, tree, window in (((60, 3), True, 20), ((122,), True, 70), ((40,), True, 2), ((62,), False, 20)):
            shape = Shape(contexts=contexts, rows=9, kv_heads=1, group=4, size=16, page_size=16)
            Text.of(shape, TYPES[kind], tree=tree, window=window, sinks=True).check([8], spare=5)


@pytest.mark.parametrize("run", [attended, lambda call: calls.fused(call, 2)], ids=["exact", "fused"])
def test_a_broken_row_reaches_those_who_see_it(run: Callable[[Call], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "DEVICE", "cpu")
    with executed_as_ptx(90):
        check_broken_rows(run, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "kind"), CASES)
def test_a_row_of_attention(capability: int, kind: str) -> None:
    check_attention(capability, TYPES[kind])


#: What CI runs of the next: head size, FP8 pages.
SAMPLED = {(64, False), (128, False), (128, True)}
#: Head size, FP8 pages, type: the tiles of `attention_tile`.
TILES = [
    pytest.param(
        size,
        fp8,
        kind,
        id=f"{size}-{kind}{'-fp8' * fp8}",
        marks=[pytest.mark.slow, *([] if kind == "bf16" and (size, fp8) in SAMPLED else [pytest.mark.full])],
    )
    for size in (64, 96, 128, 256)
    for fp8 in (False, True)
    for kind in TYPES
]


@pytest.mark.parametrize(("size", "fp8", "kind"), TILES)
def test_attention_is_right(size: int, fp8: bool, kind: str) -> None:
    """In trees and in chunks, over several tiles and splits."""
    for capability in (90,) if size == 64 else (89, 90, 120):
        for mask, causal_chunk in ((ancestors, False), (causal, True)):
            shape = Shape(contexts=(70, 0), rows=5, kv_heads=1, group=4, size=size, page_size=16)
            call = make(shape, mask).to(TYPES[kind])
            call = in_fp8(call, torch.tensor(0.011), torch.tensor(0.007)) if fp8 else call
            plain = read_back(call) if fp8 else call
            with executed_as_ptx(capability):
                found = attended(call, causal_chunk=causal_chunk)
            assert_within_budget(found, plain.run(), plain)


@pytest.mark.slow
def test_a_different_order_is_noticed() -> None:
    """Controls: sums that start elsewhere for many rows, and keys of which one changes its place."""

    def turned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        turn = 64 * (len(x) > 7)
        return sums(x.roll(turn, 1), weight.roll(turn, 1), bias)

    x, weight = numbers(9, 150).bfloat16(), numbers(33, 150, seed=1).bfloat16()
    with executed_as_ptx(90), pytest.raises(AssertionError):
        check_rows_alone(turned, x, weight, None, (7,))
    text = Text.of(Shape(contexts=(40,), rows=9, kv_heads=1, group=4, size=16, page_size=16), torch.float32, tree=False)
    original = exact.key_order
    with executed_as_ptx(90), pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "key_order", lambda mask: _reversed(original(mask)))
        with pytest.raises(AssertionError):
            text.check([8], spare=0)


def _reversed(order: Tensor) -> Tensor:
    """The same keys from the last to the first."""
    turned = order.clone()
    for line, mine in zip(order.flatten(0, 1), turned.flatten(0, 1), strict=True):
        count = int(line[-2])
        mine[:count] = line[:count].flip(0)
    return turned
