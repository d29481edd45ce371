"""The kernels, compiled as for each GPU and executed as PTX, against their specifications; any fault is an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.plugins.cascade_attention import pack_mask_bits
from d2sd.plugins.cascade_attention.triton.launch import launch
from d2sd.plugins.kv_pages import write_pages
from d2sd.plugins.shared.fp8 import to_pages
from tests.plugins.cascade_attention.cases import Attention, executed
from tests.plugins.kernels.calls import assert_within_budget
from tests.ptx.cases import CAPABILITIES, MIDDLE, SMALL, call_of, least_capability, run
from tools.ptxsim import transfers
from tools.ptxsim.launch import Launch, executed_as_ptx
from tools.ptxsim.order import Fault


def assert_right(capability: int, case: Attention) -> list[Launch]:
    found, expected, plain, launches = run(case, capability)
    assert_within_budget(found, expected, plain)
    return launches


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "case"), SMALL, ids=str)
def test_attention(capability: int, case: Attention) -> None:
    launches = assert_right(capability, case)
    assert [launch.name for launch in launches] == ["cascade_attention_kernel"]


def test_splits_may_end_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one weighs the parts, in the same order; the counters are zeros again, for the next layer."""
    capability, case = SMALL[1]
    call, arrived, found = call_of(case), torch.zeros(8, dtype=torch.int32), []
    attend = partial(launch, splits=case.splits, arrived=lambda: arrived)
    for turn in (1, -1):
        monkeypatch.setattr(transfers, "TURN", turn)
        with executed_as_ptx(capability):
            words = pack_mask_bits(call.attn_mask)
            found.append(attend(call.q, call.k, call.v, call.context, words))
        assert not arrived.any()
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_quantized_attention(splits: int) -> None:
    """To the FP8 numbers of the result in its type."""
    call, scale = call_of(SMALL[0][1]), torch.tensor(0.013)
    with executed_as_ptx(90):
        attend = partial(launch, call.q, call.k, call.v, call.context, pack_mask_bits(call.attn_mask), splits=splits)
        plain, found = attend(), attend(scale=scale)
    assert torch.equal(found.view(torch.uint8), to_pages(plain, scale).view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "case"), MIDDLE, ids=str)
def test_attention_of_each_architecture(capability: int, case: Attention) -> None:
    assert_right(capability, case)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", list(executed()), ids=str)
def test_attention_over_the_whole_table(capability: int, case: Attention) -> None:
    if capability < least_capability(case):
        pytest.skip("FP8 pages need compute capability 8.9")
    launch, *_ = assert_right(capability, case)
    products = [name for name in launch.counts if name.startswith(("mma", "wgmma.mma"))]
    assert bool(products) == (case.kind != "fp32")
    hopper = capability == 90 and case.kind != "fp32" and case.tile(90).rows >= 64
    assert any(name.startswith("wgmma") for name in products) == hopper


def written(capability: int | None, stored: torch.dtype, path: bool, dtype: torch.dtype, large: bool) -> list[Tensor]:
    """The bytes of the pages of keys and values, but for page 0, which takes padding."""
    draw = torch.Generator().manual_seed(0)
    layers, batch, rows, places, columns, pages = 2, 2, 6, 4 if path else 6, 2, 7
    heads, size = (8, 128) if large else (3, 16)
    k, v = (3 * torch.randn(layers, batch, rows, heads, size, generator=draw).to(dtype) for _ in "kv")
    k[0, 0, 0, 0, 0], v[1, 1, 1, 0, 1] = 1e4, -1e4  # beyond E4M3
    pools = [torch.full((layers, pages, 16, heads, size), 7.0).to(stored) for _ in "kv"]
    table = 1 + torch.randperm(pages - 1, generator=draw)[: batch * columns].view(batch, columns)
    positions = torch.tensor([[14], [29]]) + torch.arange(places)  # over a page's end, and the table's
    keep = torch.tensor([[True, True, False, True, True, True], [True] * 4 + [False] * 2])[:, :places]
    more: list[Any] = [torch.tensor([[0, 2, 3, 5], [1, 2, 4, 5]]) if path else None]
    if stored == torch.float8_e4m3fn:
        more += [torch.rand(layers, generator=draw) * 0.02 + 0.01 for _ in "kv"]
    if capability is None:
        write_pages.reference(k, v, pools[0], pools[1], table, positions, keep, *more)
    else:
        with executed_as_ptx(capability):
            write_pages.triton(k, v, pools[0], pools[1], table, positions, keep, *more)
    return [pool.view(torch.uint8)[:, 1:] for pool in pools]


def assert_writes(capability: int, stored: torch.dtype, path: bool, dtype: torch.dtype, large: bool) -> None:
    """Bit by bit; but for sm_89, Triton cuts fp32 to fp16 before it rounds to E4M3: one step off, seldom."""
    arguments = stored, path, dtype, large
    cut = capability == 89 and stored == torch.float8_e4m3fn
    for found, expected in zip(written(capability, *arguments), written(None, *arguments), strict=True):
        different = found != expected
        assert different.float().mean() < (0.005 if cut else 1e-9)
        assert ((found.int() - expected.int()).abs()[different] <= 1).all()


def test_page_writes() -> None:
    """Bit by bit, FP8 included: its division and both of its roundings."""
    assert_writes(90, torch.float8_e4m3fn, True, torch.bfloat16, large=False)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_page_writes_of_each_architecture(
    capability: int, dtype: torch.dtype, fp8: bool, path: bool, large: bool
) -> None:
    if fp8 and capability < 89:
        pytest.skip("FP8 pages need compute capability 8.9")
    assert_writes(capability, torch.float8_e4m3fn if fp8 else dtype, path, dtype, large)


def test_a_wrong_kernel_is_noticed() -> None:
    """One token of context too few, and one too many, whose slot holds NaN."""
    case = Attention("bf16", 16, 1, contexts=(20,))
    call = call_of(case)
    for change in (-1, 1):
        found, _, _, _ = run(case, 80, call.over(context_len=call.context.context_len + change))
        with pytest.raises(AssertionError):
            assert_within_budget(found, call.run(), call)


def test_columns_that_do_not_exist_are_a_fault() -> None:
    """A page table that is shorter than the context."""
    case = Attention("bf16", 16, 1, contexts=(40,))
    call = call_of(case)
    with pytest.raises(Fault, match=r"out of bounds .* of page_table"):
        run(case, 80, call.over(page_table=call.context.page_table[:, :2].contiguous()))
