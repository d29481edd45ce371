"""The kernels between a layer's products against their specification and the loops.

The interpreter rounds to fp16 as a GPU does, so there the bits must be equal; it cuts bf16 and FP8 off.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.plugins.cascade_attention import pack_mask_bits
from d2sd.plugins.layer_ops import Front, Heads, PagedRows
from d2sd.plugins.layer_ops.triton.launch import BLOCK
from tests.plugins.cases import implementations
from tests.plugins.kernels.calls import INTERPRETED, there
from tests.plugins.test_layer_ops import (
    EPS,
    HEADS,
    HKV,
    HQ,
    ROWS,
    SIZE,
    WIDTH,
    beginning,
    heads_of,
    looped_heads,
    looped_norm,
    products,
    some,
    tables,
)

__all__ = ["HQ"]
reference, launch = (implementations("layer_ops", which) for which in ("reference", "triton"))
#: Share of numbers that may be other bits, and by how much relatively: sums and functions of another order.
TYPES = {torch.float32: (1.0, 2e-6), torch.float16: (0.002, 2e-3), torch.bfloat16: (1.0, 4e-2)}
if not INTERPRETED:
    TYPES[torch.bfloat16] = (0.002, 2e-2)


def _same(x: Any) -> Any:
    return x


def assert_same(found: Tensor, expected: Tensor) -> None:
    share, relative = TYPES[expected.dtype]
    found = found.cpu()
    assert found.dtype == expected.dtype
    assert int((found != expected).sum()) <= share * found.numel()
    torch.testing.assert_close(found, expected, rtol=relative, atol=relative)


def made_heads(ops: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.full((2, len(qkv), ROWS, HKV, SIZE), torch.nan, dtype=cos.dtype, device=qkv.device)
    return ops.qk_norm_rope(qkv, cos, sin, heads, k, v), k, v


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("layers", "queries", "norms", "fp8"), HEADS)
def test_heads(layers: int, queries: int, norms: bool, fp8: bool, dtype: torch.dtype) -> None:
    qkv = products(layers, queries).to(torch.float32 if fp8 else dtype)
    arguments = qkv, *tables(dtype), heads_of(layers, queries, norms=norms, fp8=fp8, dtype=dtype)
    found = made_heads(launch, *(there(x) for x in arguments))
    for ours, expected in zip(found, made_heads(reference, *arguments), strict=True):
        assert_same(ours, expected)
    if dtype == torch.float32:
        for ours, looped in zip(found, looped_heads(*arguments), strict=True):
            torch.testing.assert_close(ours.cpu().double(), looped, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("layers", "queries", "norms", "fp8"), HEADS)
def test_what_is_broken_in_a_value_moves_to_its_key(
    layers: int, queries: int, norms: bool, fp8: bool, number: float
) -> None:
    """Attention hides keys; a hidden value would be multiplied by 0."""
    qkv = products(layers, queries)
    heads, made = heads_of(layers, queries, norms=norms, fp8=fp8, dtype=torch.float32), []
    place = -1 if queries else -SIZE // 2 - 1  # in either half of the last value
    for value in (0.0, number):
        qkv[0, 2, place] = value
        arguments = qkv, *tables(torch.float32), heads
        made.append(made_heads(launch, *(there(x) for x in arguments)))
        for ours, expected in zip(made[-1], made_heads(reference, *arguments), strict=True):
            torch.testing.assert_close(ours.cpu(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    (q, k, v), (broken_q, broken_k, broken_v) = made
    assert torch.equal(broken_q, q)
    assert broken_k[0, 2, -1].isnan().all()
    assert not broken_v[0, 2, -1].any()
    broken_k[0, 2, -1], broken_v[0, 2, -1] = k[0, 2, -1], v[0, 2, -1]
    assert torch.equal(broken_k, k)
    assert torch.equal(broken_v, v)


@pytest.mark.parametrize(("layers", "queries"), [(1, HKV), (2, 0)])
def test_heads_of_fp8_pages(layers: int, queries: int) -> None:
    """Values that are E4M3 numbers times a power of two, another one for the keys and values of each layer: the
    interpreter cannot round to FP8. Rounded with a smaller scale, the larger ones would saturate.
    """
    k_scale, v_scale = 2.0 ** -torch.tensor([5.0, 4.0])[:layers], 2.0 ** -torch.tensor([7.0, 2.0])[:layers]
    numbers = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers[::5] = 1e4  # saturates
    heads = torch.cat([torch.ones(layers, queries), *(s[:, None].expand(layers, HKV) for s in (k_scale, v_scale))], 1)
    factors = heads.repeat_interleave(SIZE, 1)[:, None]
    columns = factors.shape[-1]
    qkv = numbers.repeat(-(-layers * ROWS * columns // len(numbers)))[: layers * ROWS * columns]
    qkv = qkv.view(layers, ROWS, columns) * factors
    of = Heads(queries, HKV, SIZE, EPS, k_scale=k_scale, v_scale=v_scale)
    arguments = qkv, torch.ones(ROWS, SIZE // 2), torch.zeros(ROWS, SIZE // 2), of
    found = made_heads(launch, *(there(x) for x in arguments))
    for ours, expected in zip(found, made_heads(reference, *arguments), strict=True):
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_heads_of_context(fp8: bool, dtype: torch.dtype) -> None:
    """The first four rows go to pages of two tokens: one is not kept, one is past its table; the fifth is a draft's."""
    keep, at = torch.tensor([[True, True], [False, True]]), torch.tensor([[4, 1], [3, 90]])
    numbers = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    columns = (HQ + 2 * HKV) * SIZE
    k_scale, v_scale = torch.tensor([2.0**-5]), torch.tensor([2.0**-2])
    if fp8:  # what pages hold exactly, as the interpreter cannot round to FP8
        factors = torch.cat([torch.ones(HQ), k_scale.expand(HKV), v_scale.expand(HKV)]).repeat_interleave(SIZE)
        qkv = numbers.repeat(-(-ROWS * columns // len(numbers)))[: ROWS * columns].view(1, ROWS, columns) * factors
        heads = Heads(HQ, HKV, SIZE, EPS, k_scale=k_scale, v_scale=v_scale)
        cos, sin = torch.ones(ROWS, SIZE // 2).to(dtype), torch.zeros(ROWS, SIZE // 2).to(dtype)
    else:
        qkv, (cos, sin) = products(1, HQ), tables(dtype)
        heads = heads_of(1, HQ, norms=True, fp8=False, dtype=dtype)
    given = qkv.to(dtype), cos, sin, heads
    made = []
    for ops, where in ((reference, _same), (launch, there)):
        k_pages, v_pages = torch.zeros(2, 6, 2, HKV, SIZE).to(torch.float8_e4m3fn if fp8 else dtype)
        paged = where(PagedRows(k_pages, v_pages, torch.tensor([[2, 1, 4], [5, 3, 1]]), at, keep))
        k, v = where(torch.full((2, 1, ROWS, HKV, SIZE), torch.nan, dtype=dtype)).unbind()
        q = ops.qk_norm_rope(*map(where, given), k, v, paged)
        stored = [x.float().cpu() for x in (paged.k_pages, paged.v_pages)]
        assert all(not x[[1, 3, 5]].any() for x in stored)  # of block 2 the page 4, of block 0 the second of page 2
        assert all(not x[4, 1].any() and not x[2, 0].any() for x in stored)
        made.append([q, k[:, 4:], v[:, 4:], *(x[[4, 2]].to(dtype) for x in stored)])
    for ours, expected in zip(made[1], made[0], strict=True):
        assert_same(ours, expected)
    plain = made_heads(reference, *given)
    for pages, whole in zip(made[0][3:], plain[1:], strict=True):
        scale = (k_scale if whole is plain[1] else v_scale) if fp8 else 1
        assert torch.equal(pages[0, 0] * scale, whole[0, 0].to(dtype))
        assert torch.equal(pages[1, 1] * scale, whole[0, 1].to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [WIDTH, 1024])
def test_norm(width: int, dtype: torch.dtype) -> None:
    x, branch = some(ROWS, 2 * width)[:, width:].to(dtype), some(ROWS, width, seed=1).to(dtype)
    weight = some(width, seed=2).to(dtype)
    totals = [there(torch.zeros(ROWS, 3 * width, dtype=dtype))[:, width : 2 * width] for _ in "ab"]
    x, branch, weight = there(x), there(branch), there(weight)
    found = launch.add_rms_norm(x, branch, weight, EPS, total=totals[0])
    expected = reference.add_rms_norm(x, branch, weight, EPS, total=totals[1]).cpu()
    assert_same(found, expected)
    assert_same(totals[0], totals[1].cpu())
    assert_same(launch.add_rms_norm(x, None, weight, EPS), reference.add_rms_norm(x, None, weight, EPS).cpu())
    blocks = there(torch.cat([x.cpu()] * 3)), there(torch.cat([branch.cpu()] * 3)), weight, EPS
    of_slots = [ops.add_rms_norm(*blocks, block=ROWS).cpu() for ops in (launch, reference)]
    assert_same(*of_slots)
    assert torch.equal(of_slots[0], torch.cat([found[1:]] * 3).cpu())
    rows = there(torch.zeros(ROWS + 3, width, dtype=dtype))
    assert launch.add_rms_norm(x, branch, weight, EPS, out=rows[2:-1]).data_ptr() == rows[2:].data_ptr()
    assert_same(rows[2:-1], expected)
    assert not rows[:2].any()
    assert not rows[-1].any()
    if dtype == torch.float32:
        looped = [looped_norm(line, weight.tolist()) for line in (x.double() + branch.double()).tolist()]
        torch.testing.assert_close(found.cpu(), torch.tensor(looped), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("behind", "context"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("width", [WIDTH, 1024])
def test_embedded(width: int, behind: bool, context: bool, dtype: torch.dtype) -> None:
    given, front = beginning(width, behind=behind, context=context, dtype=dtype)
    expected = reference.embed_norm_rope(*given, front=front)
    rows = there(torch.zeros(len(expected[1]) + 3, width, dtype=dtype))
    found = launch.embed_norm_rope(*map(there, given), out=rows[2:-1], front=there(front))
    assert torch.equal(found[0].cpu(), expected[0])
    for ours, wanted in zip(found[1:], expected[1:], strict=True):
        assert_same(ours, wanted)
    assert found[1].data_ptr() == rows[2:].data_ptr()
    assert not rows[:2].any()
    assert not rows[-1].any()
    # The same bits as of the norm alone: a row of a prompt and of a tree may begin either way.
    alone = launch.add_rms_norm(found[0], None, there(given[2]), EPS)
    assert torch.equal(found[1][-len(alone) :], alone)


def test_a_norm_may_add_in_place() -> None:
    x, branch, weight = there(some(ROWS, WIDTH)), there(some(ROWS, WIDTH, seed=1)), there(some(WIDTH, seed=2))
    expected = reference.add_rms_norm(x, branch, weight, EPS).cpu()
    summed = x + branch
    assert_same(launch.add_rms_norm(x, branch, weight, EPS, total=x), expected)
    assert torch.equal(x, summed)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_gate(scaled: bool, dtype: torch.dtype) -> None:
    gate_up = (some(ROWS, 2 * (BLOCK + 7)) * 5).to(torch.float32 if scaled else dtype)
    scales = torch.tensor([0.5, 3.0]) if scaled else None
    found = launch.silu_mul(there(gate_up), dtype, scales=there(scales))
    assert_same(found, reference.silu_mul(gate_up, dtype, scales=scales))


@pytest.mark.parametrize("dtype", TYPES)
def test_tables(dtype: torch.dtype) -> None:
    frequencies, positions = 1e4 ** -(torch.arange(11) / 11), torch.tensor([[0, 3, 131_071], [9, 4_000, 17]])
    found = launch.rope_tables(there(positions), there(frequencies), 1.1, dtype)
    for ours, expected in zip(found, reference.rope_tables(positions, frequencies, 1.1, dtype), strict=True):
        assert_same(ours, expected)
    behind = launch.rope_tables(there(positions[0]), there(frequencies), 1.1, dtype, there(positions[1:]))
    for ours, expected in zip(behind, found, strict=True):
        assert torch.equal(ours.cpu(), torch.cat([expected[3:], expected[:3]]).cpu())


def test_quantized_results() -> None:
    """E4M3 numbers times a power of two, and some that saturate."""
    scale = torch.tensor(2.0**-5)
    x = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * scale
    x = torch.cat([x, -x, torch.tensor([1e5, -1e5, 15.0])])
    assert torch.equal(launch.quantize(there(x), there(scale)).cpu().float(), reference.quantize(x, scale).float())
    one = torch.tensor(1.0)
    gate_up = torch.cat([torch.full((1, 64), 100.0), torch.arange(64.0)[None] // 8], dim=1)  # silu(100) is 100
    room = there(torch.zeros(3, 64).to(torch.float8_e4m3fn))  # what is behind the rows is not written
    found = launch.silu_mul(there(gate_up), torch.float32, scale=there(one * 100), out=room[:1])
    assert found.data_ptr() == room.data_ptr()
    assert room.cpu().float().tolist() == [(torch.arange(64) // 8).tolist(), [0] * 64, [0] * 64]
    found = launch.quantize(there(gate_up[:, 64:]), there(one), out=room[1:2])
    assert room.cpu().float().tolist() == [(torch.arange(64) // 8).tolist()] * 2 + [[0] * 64]
    ones = there(torch.ones(2, 16))
    found = launch.add_rms_norm(ones, None, 3 * ones[0], 0.0, scale=there(one / 4))
    assert found.cpu().float().tolist() == [[12.0] * 16] * 2
    tokens = there(torch.tensor([1, 0]))
    front = Front(ones[:1], 2 * ones[0], tokens[:1])
    given = tokens, ones, 3 * ones[0], 0.0, tokens, ones[0, :4], 1.0
    found = launch.embed_norm_rope(*given, scale=there(one / 4), front=front)[1]
    assert found.cpu().float().tolist() == [[8.0] * 16, *[[12.0] * 16] * 2]


@pytest.mark.parametrize("rows", [5, 33])
def test_masks_pack(rows: int) -> None:
    attn_mask = torch.rand(2, rows, rows, generator=torch.Generator().manual_seed(rows)) < 0.5
    assert torch.equal(pack_mask_bits.triton(there(attn_mask)).cpu(), pack_mask_bits.reference(attn_mask))
    for strided in (attn_mask[:1].transpose(1, 2), attn_mask[1:].expand(2, rows, rows)):
        assert torch.equal(pack_mask_bits.triton(there(strided)).cpu(), pack_mask_bits.reference(strided))
