"""A target's whole step with `exact`, executed as PTX: the same bits in plain decoding, chunks and trees."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.plugins.layer_ops import linear
from tests.plugins.exact_step import check_step
from tools.ptxsim.launch import executed_as_ptx

#: The text of 39 tokens fills two tiles, or one, and two splits where a tile has 32 positions.
pytestmark = pytest.mark.usefixtures("short_splits")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("capability", "dtype", "besides"),
    [
        (90, torch.bfloat16, ""),
        (80, torch.float32, ""),
        (90, torch.bfloat16, "hybrid"),
        pytest.param(80, torch.float32, "hybrid", marks=pytest.mark.full),
        pytest.param(90, torch.bfloat16, "windows", marks=pytest.mark.full),
        pytest.param(80, torch.float32, "windows", marks=pytest.mark.full),
        *(
            pytest.param(capability, dtype, "", marks=pytest.mark.full)
            for capability, dtype in ((80, torch.bfloat16), (89, torch.float16), (120, torch.bfloat16))
        ),
    ],
)
def test_plain_decoding_chunks_and_trees_give_the_same_bits(capability: int, dtype: torch.dtype, besides: str) -> None:
    with executed_as_ptx(capability) as launches:
        hybrid = besides == "hybrid"
        check_step(dtype, windows=besides == "windows", hybrid=hybrid, layers_as_kernels=hybrid)
    names = {one.name for one in launches}
    assert names >= {"linear_kernel", "attention_kernel", "merge_splits_kernel", "key_order_kernel"}
    assert ("delta_inputs_kernel" in names) == ("recurrence_kernel" in names) == hybrid


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_layer_of_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down products whose sums start elsewhere where there are many rows."""
    original = linear.triton

    def turned(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
        turn = 16 * (x.shape[:-1].numel() > 16 and x.shape[-1] == 64)
        return original(x.roll(turn, -1), weight.roll(turn, 1), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(linear, "triton", turned)
    with executed_as_ptx(80), pytest.raises(AssertionError):
        check_step(torch.float32)  # whose results hide nothing
