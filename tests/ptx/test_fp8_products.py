"""Our FP8 products as executed PTX: right within 14-bit sums, and the same bits alone and among others."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.plugins.layer_ops import linear
from d2sd.plugins.shared.fp8 import to_pages
from tests.plugins.batch_invariance import check_rows_alone, numbers
from tools.ptxsim.launch import executed_as_ptx
from tools.ptxsim.order import Fault

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
    return linear.triton(x, weight, bias, None, torch.float32)


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
    expected = linear.reference(x, weight, bias, None, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.02)
    assert len({launch.ptx for launch in launches}) == 1, "one kernel, whatever the number of rows"


def test_scales_and_a_bias() -> None:
    x, weight, scales = to_pages(numbers(5, 150), ONE), to_pages(numbers(37, 150, seed=1), ONE), (ONE / 2, ONE / 4)
    with executed_as_ptx(90, waited_for):
        found = linear.triton(x, weight, numbers(37).bfloat16(), scales, torch.bfloat16)
    expected = linear.reference(x, weight, numbers(37).bfloat16(), scales, torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_triton_leaves_the_wait_to_ptxas() -> None:
    """When this fails, `waited_for` is not needed any more."""
    x, weight = (to_pages(numbers(rows, 512), ONE) for rows in (3, 5))
    with pytest.raises(Fault, match="is read while wgmma in flight writes it, at `add"), executed_as_ptx(90):
        sums(x, weight)
