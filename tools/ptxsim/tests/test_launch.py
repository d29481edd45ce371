"""A launch knows of its tensors which it may write, which overlap, and what lies between their numbers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from tools.ptxsim.launch import executed_as_ptx
from tools.ptxsim.order import Fault


@triton.jit  # type: ignore[untyped-decorator]
def turned_kernel(x, out, STRIDE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[n] = x[n + 32]: of 64 numbers, those of the other warp."""
    n = tl.arange(0, SIZE)
    place = out + n * STRIDE
    tl.store(place, tl.load(x + (n + 32) % SIZE))


def test_tensors_that_overlap_are_one_memory() -> None:
    x = torch.arange(64)
    out = torch.zeros(64, dtype=torch.long)
    with executed_as_ptx(90) as launches:
        turned_kernel[(1,)](x, out, 1, 64, num_warps=2)
        assert out.tolist() == x.roll(-32).tolist()
        both = torch.arange(96)
        turned_kernel[(1,)](both[:64], both[64:], 1, 32, num_warps=1)  # side by side
        assert both.tolist() == [*range(64), *range(32)]
        with pytest.raises(Fault, match="global race: write after another warp's read"):
            turned_kernel[(1,)](x, x, 1, 64, num_warps=2)
    assert x.tolist() == list(range(64))
    assert launches


def test_a_launch_is_dependent_where_it_is_launched_as_such() -> None:
    """By Triton's option."""
    x, out = torch.arange(64), torch.zeros(64, dtype=torch.long)
    with executed_as_ptx(90) as launches:
        turned_kernel[(1,)](x, out, 1, 64, num_warps=2)
        with pytest.raises(Fault, match=r"dependent launch before griddepcontrol\.wait"):
            turned_kernel[(1,)](x, out, 1, 64, num_warps=2, launch_pdl=True)
    assert [launch.dependent for launch in launches] == [False]


def test_what_lies_between_a_tensors_numbers_is_not_its_own() -> None:
    x, out = torch.arange(64), torch.zeros(64, 4, dtype=torch.long)
    with executed_as_ptx(90):
        turned_kernel[(1,)](x, out[:, 1], 4, 64, num_warps=2)
        assert out.tolist() == [[0, number, 0, 0] for number in x.roll(-32).tolist()]
        with pytest.raises(Fault, match="global write out of bounds by 48 lanes, at byte 8 of out"):
            turned_kernel[(1,)](x, out[:, 1], 1, 64, num_warps=2)
