"""Our products in shares of the inputs as executed PTX: right, the same bits in any order, weights asked for ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.plugins.layer_ops import split_linear
from d2sd.plugins.layer_ops.triton import products
from d2sd.plugins.layer_ops.triton.products import LinearTile
from d2sd.plugins.shared.fp8 import to_pages
from tests.plugins.batch_invariance import check_rows_alone, numbers
from tests.ptx.orders import in_order
from tests.ptx.test_fp8_products import ONE, waited_for
from tools.ptxsim.launch import executed_as_ptx


class Kind(NamedTuple):
    """Type of both factors, and how far from the specification their sums may be."""

    dtype: torch.dtype
    rtol: float
    atol: float

    def numbers(self, rows: int, width: int, *, seed: int = 0, scale: Tensor | int = 1) -> Tensor:
        x = numbers(rows, width, seed=seed) * scale
        return to_pages(x, ONE) if self.dtype == torch.float8_e4m3fn else x.to(self.dtype)


KINDS = {
    "fp8": Kind(torch.float8_e4m3fn, 1e-3, 0.05),  # tensor cores keep 14 bits
    "bf16": Kind(torch.bfloat16, 1e-5, 1e-3),
    "fp16": Kind(torch.float16, 1e-5, 1e-3),
}


def cases(*unmarked: tuple[str, int], full: tuple[tuple[str, int], ...] = ()) -> pytest.MarkDecorator:
    """Cases of (kind, capability)."""
    marked = [pytest.param(*case, marks=pytest.mark.full) for case in full]
    return pytest.mark.parametrize(("kind", "capability"), [*unmarked, *marked])


OTHERS = (("fp8", 89), ("fp8", 120), ("bf16", 80), ("bf16", 89), ("bf16", 120), ("fp16", 90))


def shares_of(tile: LinearTile, x: Tensor, weight: Tensor) -> Tensor:
    """The sums of each share of the inputs, added in fp32, the first share first."""
    width = x.shape[1] // tile.splits
    total = torch.zeros(())
    for number in range(tile.splits):
        part = slice(number * width, (number + 1) * width)
        whole = replace(tile, splits=1)
        total = total + products._linear(x[:, part].clone(), weight[:, part].clone(), None, None, torch.float32, whole)
    return total


def sums(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return split_linear.triton(x, weight, None, torch.float32)


@pytest.mark.slow
@cases(("fp8", 90), ("bf16", 90), full=OTHERS)
def test_a_row_of_a_product_in_shares(kind: str, capability: int) -> None:
    """Several shares of two tiles, more rows than a tile has."""
    made = KINDS[kind]
    x, weight = made.numbers(67, 2048), made.numbers(256, 2048, seed=1)
    with executed_as_ptx(capability, waited_for) as launches:
        found = sums(x, weight)
        check_rows_alone(sums, x[:7], weight, None, (1,))
        assert torch.equal(sums(x[60:], weight), found[60:])
    expected = split_linear.reference(x, weight, None, torch.float32)
    torch.testing.assert_close(found, expected, rtol=made.rtol, atol=made.atol)
    assert len({launch.ptx for launch in launches}) == 1, "one kernel, whatever the number of rows"


@pytest.mark.slow
@cases(("fp8", 90), ("bf16", 90), full=OTHERS)
def test_shares_are_added_in_order(kind: str, capability: int) -> None:
    """To the bit, where the first is so large that each addition rounds."""
    made, scale = KINDS[kind], torch.where(torch.arange(2048) < 512, 100, 1)
    x, weight = made.numbers(3, 2048, scale=scale), made.numbers(256, 2048, seed=1)
    tile = products.split_tile(*weight.shape, weight.element_size())
    assert tile.splits == (4 if kind == "fp8" else 8)
    with executed_as_ptx(capability, waited_for):
        assert torch.equal(sums(x, weight), shares_of(tile, x, weight))


@pytest.mark.slow
@cases(("fp8", 90), ("bf16", 90), full=OTHERS)
def test_shares_may_end_in_any_order(kind: str, capability: int) -> None:
    """Bit for bit, over counters that are zeros again; FP8 is scaled as PyTorch's product is."""
    made = KINDS[kind]
    x, weight = made.numbers(3, 1024), made.numbers(128, 1024, seed=1)
    scales = (ONE / 2, ONE / 4) if kind == "fp8" else None
    arrived, expected = torch.zeros(1, dtype=torch.int32), None
    for order in (None, "first", "last"):
        with in_order(order), executed_as_ptx(capability, waited_for):
            found = split_linear.triton(x, weight, scales, torch.bfloat16, arrived)
        assert not arrived.any(), order
        expected = found if expected is None else expected
        assert torch.equal(found, expected), order
    specified = split_linear.reference(x, weight, scales, torch.bfloat16)
    torch.testing.assert_close(found, specified, rtol=1e-2, atol=1e-2)


@cases(("fp8", 89), ("fp8", 90), ("bf16", 90), ("bf16", 120))
def test_weights_are_asked_for_ahead(kind: str, capability: int) -> None:
    """By all threads, a row of the tile each, before the wait; nothing where no launch is dependent."""
    made = KINDS[kind]
    x, weight = made.numbers(1, 512), made.numbers(128, 512, seed=1)
    with executed_as_ptx(capability, waited_for) as launches:
        sums(x, weight)
    (one,) = launches
    asked, waits = one.ptx.find("cp.async.bulk.prefetch.L2"), one.ptx.find("griddepcontrol.wait")
    assert (asked < waits) if capability >= 90 else (asked == waits == -1)
    assert one.counts["cp.async.bulk.prefetch.L2.global"] == (capability >= 90)


def test_shares_by_shape() -> None:
    """Enough programs for all multiprocessors, and no shorter shares than that takes."""
    shapes = {(4096, 4096): 4, (6144, 4096): 4, (24576, 4096): 1, (4096, 12288): 4, (1024, 4096): 8, (128, 512): 1}
    assert {shape: products.split_tile(*shape, 1).splits for shape in shapes} == shapes
    assert {shape: products.split_tile(*shape, 2).splits for shape in shapes} == shapes | {(128, 512): 2}
    assert [products.split_tile(128, 256, itemsize).ahead for itemsize in (1, 2)] == [256, 512], "not beyond the row"
