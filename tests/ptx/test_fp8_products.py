"""Our FP8 products as executed PTX: right within 14-bit sums, and the same bits alone and among others."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.plugins.layer_ops import reference
from d2sd.plugins.layer_ops.triton import products
from d2sd.plugins.layer_ops.triton.products import LinearTile
from d2sd.plugins.shared.fp8 import to_pages
from ptxsim.launch import executed_as_ptx
from ptxsim.order import Fault
from tests.plugins.batch_invariance import check_rows_alone, numbers
from tests.ptx.orders import in_order

ONE = torch.tensor(1.0)
CAPABILITIES = (89, 90, 120)
_LAST_PRODUCT = re.compile(r"(wgmma\.mma_async[^;]*;)((?:(?!wgmma)[^;])*?add\.rn\.f32)")


def waited_for(_: str, ptx: str) -> str:
    """PTX with a wait between the last product of a chunk and the addition of its sums.

    Triton 3.7.1 leaves it out. ptxas puts it in, and says so: "warpgroup.wait is injected [...] to allow use of
    registers defined by GMMA" (C7517).
    """
    wait = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
    return _LAST_PRODUCT.sub(lambda found: f"{found[1]}\n{wait}\n{found[2]}", ptx)


def sums(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return products.linear(x, weight, bias, None, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sums_of_many_inputs_keep_their_digits(capability: int) -> None:
    """All positive: a sum of 14 bits loses what is added late, 8 % of 4,096 inputs; one in fp32 every 128 does not."""
    x, weight = (to_pages(numbers(rows, 4096, seed=rows).abs() + 0.5, ONE) for rows in (3, 5))
    expected = x.double() @ weight.double().T
    with executed_as_ptx(capability, waited_for) as launches:
        found = sums(x, weight)
    kinds = {name.split(".")[0] for name in launches[0].counts if name.startswith(("mma", "wgmma.mma"))}
    assert kinds == {"wgmma" if capability == 90 else "mma"}
    lost = ((expected - found) / expected).abs().max()
    assert lost < 0.005
    assert capability != 90 or lost > 1e-5, "14 bits are modelled"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (89, 120))])
def test_a_row_of_an_fp8_product(capability: int) -> None:
    """More rows than a tile has; inputs and outputs that no tile divides."""
    x, weight = to_pages(numbers(67, 300), ONE), to_pages(numbers(33, 300, seed=1), ONE)
    bias = numbers(33, seed=2)
    with executed_as_ptx(capability, waited_for) as launches:
        found = sums(x, weight, bias)
        check_rows_alone(sums, x, weight, bias, (1, 7, 64))
    expected = reference.linear(x, weight, bias, None, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.02)
    assert len({launch.ptx for launch in launches}) == 1, "one kernel, whatever the number of rows"


def test_scales_and_a_bias() -> None:
    x, weight, scales = to_pages(numbers(5, 150), ONE), to_pages(numbers(37, 150, seed=1), ONE), (ONE / 2, ONE / 4)
    with executed_as_ptx(90, waited_for):
        found = products.linear(x, weight, numbers(37).bfloat16(), scales, torch.bfloat16)
    expected = reference.linear(x, weight, numbers(37).bfloat16(), scales, torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def shares_of(tile: LinearTile, x: Tensor, weight: Tensor) -> Tensor:
    """The sums of each share of the inputs, added in fp32, the first share first."""
    width = x.shape[1] // tile.splits
    total = torch.zeros(())
    for number in range(tile.splits):
        part = slice(number * width, (number + 1) * width)
        whole = replace(tile, splits=1)
        total = total + products._linear(x[:, part].clone(), weight[:, part].clone(), None, None, torch.float32, whole)
    return total


def split_sums(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return products.split_linear(x, weight, None, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=pytest.mark.full) for other in (89, 120))])
def test_a_row_of_a_product_in_shares(capability: int) -> None:
    """Four shares of two tiles, more rows than a tile has."""
    x, weight = to_pages(numbers(67, 2048), ONE), to_pages(numbers(256, 2048, seed=1), ONE)
    with executed_as_ptx(capability, waited_for) as launches:
        found = split_sums(x, weight)
        check_rows_alone(split_sums, x[:7], weight, None, (1,))
        assert torch.equal(split_sums(x[60:], weight), found[60:])
    expected = reference.split_linear(x, weight, None, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.05)
    assert len({launch.ptx for launch in launches}) == 1, "one kernel, whatever the number of rows"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=pytest.mark.full) for other in (89, 120))])
def test_shares_are_added_in_order(capability: int) -> None:
    """To the bit, where the first is so large that each addition rounds."""
    scale = torch.where(torch.arange(2048) < 512, 100, 1)
    x, weight = to_pages(numbers(3, 2048) * scale, ONE), to_pages(numbers(256, 2048, seed=1), ONE)
    tile = products.split_tile(*weight.shape)
    assert tile.splits == 4
    with executed_as_ptx(capability, waited_for):
        assert torch.equal(split_sums(x, weight), shares_of(tile, x, weight))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [pytest.param(89, marks=pytest.mark.full), 90])
def test_shares_may_end_in_any_order(capability: int) -> None:
    """Bit for bit, over counters that are zeros again; scaled as PyTorch's product is."""
    x, weight, scales = to_pages(numbers(3, 1024), ONE), to_pages(numbers(128, 1024, seed=1), ONE), (ONE / 2, ONE / 4)
    arrived, expected = torch.zeros(1, dtype=torch.int32), None
    for order in (None, "first", "last"):
        with in_order(order), executed_as_ptx(capability, waited_for):
            found = products.split_linear(x, weight, scales, torch.bfloat16, arrived)
        assert not arrived.any(), order
        expected = found if expected is None else expected
        assert torch.equal(found, expected), order
    specified = reference.split_linear(x, weight, scales, torch.bfloat16)
    torch.testing.assert_close(found, specified, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("capability", [89, 90, 120])
def test_weights_are_asked_for_ahead(capability: int) -> None:
    """By all threads, a row of the tile each, before the wait; nothing where no launch is dependent."""
    x, weight = to_pages(numbers(1, 512), ONE), to_pages(numbers(128, 512, seed=1), ONE)
    with executed_as_ptx(capability, waited_for) as launches:
        split_sums(x, weight)
    (one,) = launches
    asked, waits = one.ptx.find("cp.async.bulk.prefetch.L2"), one.ptx.find("griddepcontrol.wait")
    assert (asked < waits) if capability >= 90 else (asked == waits == -1)
    assert one.counts["cp.async.bulk.prefetch.L2.global"] == (capability >= 90)


def test_shares_by_shape() -> None:
    """Enough programs for all multiprocessors, and no shorter shares than that takes."""
    shapes = {(4096, 4096): 4, (6144, 4096): 4, (24576, 4096): 1, (4096, 12288): 4, (1024, 4096): 8, (128, 512): 1}
    assert {shape: products.split_tile(*shape).splits for shape in shapes} == shapes
    assert products.split_tile(128, 256).ahead == 256, "not beyond the row"


def test_triton_leaves_the_wait_to_ptxas() -> None:
    """When this fails, `waited_for` is not needed any more."""
    x, weight = (to_pages(numbers(rows, 512), ONE) for rows in (3, 5))
    with pytest.raises(Fault, match="is read while wgmma in flight writes it, at `add"), executed_as_ptx(90):
        sums(x, weight)
