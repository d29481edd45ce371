"""The kernels of gated attention and of gated delta nets against their specifications."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule import DeltaRows
from d2sd.plugins.gated_layers import DeltaHeads
from d2sd.plugins.layer_ops import Heads
from tests.plugins.cases import implementations
from tests.plugins.delta_rule.draws import mask_of, tree
from tests.plugins.kernels.calls import INTERPRETED, there
from tests.plugins.kernels.layers import TYPES, assert_same
from tests.plugins.test_layer_ops import EPS, some

reference, launch = (implementations("layer_ops", which) for which in ("reference", "triton"))
gates_reference, gates_launch = (implementations("gated_layers", which) for which in ("reference", "triton"))
# No two sizes are equal, and heads are no powers of two.
ROWS, HQ, HKV, SIZE, ROTARY = 5, 6, 2, 44, 20
KEYS, VALUES, KEY, VALUE, TAPS = 3, 6, 20, 12, 4
CHANNELS = 2 * KEYS * KEY + VALUES * VALUE
#: Of sums over taps, each input of which the interpreter may have cut off.
BOUND = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-5 if INTERPRETED else 2**-7}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rotary", [ROTARY, None])
@pytest.mark.parametrize(("gated", "scaled"), [(False, False), (True, False), (True, True)])
def test_heads(gated: bool, scaled: bool, rotary: int | None, dtype: torch.dtype) -> None:
    """Rotated in part or in whole, with norms of 1 + weight."""
    columns = (HQ * (2 if gated else 1) + 2 * HKV) * SIZE
    heads = Heads(
        HQ,
        HKV,
        SIZE,
        EPS,
        some(SIZE, seed=1).to(dtype),
        some(1, SIZE, seed=2).to(dtype),
        some(1, columns, seed=3).to(dtype) if scaled else None,
        some(1, 3, seed=4).abs() if scaled else None,
        rotary=rotary,
        gated=gated,
        norm_offset=True,
    )
    qkv = some(1, ROWS, columns, seed=5).to(torch.float32 if scaled else dtype)
    angles = some(ROWS, (rotary or SIZE) // 2, seed=6)

    def made(ops: Any, put: Any) -> tuple[Tensor, ...]:
        k, v = put(torch.full((2, 1, ROWS, HKV, SIZE), torch.nan, dtype=dtype)).unbind()
        given = (qkv, angles.cos().to(dtype), angles.sin().to(dtype), heads)
        return ops.qk_norm_rope(*map(put, given), k, v), k, v

    for ours, expected in zip(made(launch, there), made(reference, lambda x: x), strict=True):
        assert_same(ours, expected)
    if gated:
        x = some(ROWS, HQ, SIZE, seed=7).to(dtype)
        found = gates_launch.gate_heads(there(x), there(qkv[0]), there(heads))
        assert_same(found, gates_reference.gate_heads(x, qkv[0], heads))


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_of_one_and_a_weight(dtype: torch.dtype) -> None:
    x, branch, weight = (
        some(*shape, seed=seed).to(dtype) for seed, shape in enumerate([(ROWS, 37), (ROWS, 37), (37,)])
    )
    found = launch.add_rms_norm(there(x), there(branch), there(weight), EPS, offset=True)
    assert_same(found, reference.add_rms_norm(x, branch, weight, EPS, offset=True))
    tokens, angles = torch.tensor([4, 0, 2]), some(7, seed=3)
    given = tokens, x, weight, EPS, tokens, angles, 1.1
    ours, wanted = (ops.embed_norm_rope(*map(put, given), offset=True)[1] for ops, put in BOTH)
    assert_same(ours, wanted)


BOTH: tuple[tuple[Any, Any], ...] = ((launch, there), (reference, lambda x: x))


def delta_heads(*, grouped: bool, scaled: bool, dtype: torch.dtype) -> DeltaHeads:
    return DeltaHeads(
        KEYS,
        VALUES,
        KEY,
        VALUE,
        some(CHANNELS, TAPS, seed=1).to(dtype),
        -some(VALUES, seed=2).exp(),
        some(VALUES, seed=3).to(dtype),
        grouped,
        2.0 ** torch.tensor([1, -1, 0, 2]) if scaled else None,  # which rounds nothing
    )


def products(rows: int, *, scaled: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns of one product, or of two, with others between and behind them."""
    both = some(rows, CHANNELS + VALUES * VALUE + 2 * VALUES + 5, seed=5).to(dtype)
    both = both.float() if scaled else both
    return both, 2 * both[:, -2 * VALUES - 2 : -2]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("nodes", [1, 37, None])
def test_delta_inputs(nodes: int | None, grouped: bool, scaled: bool, dtype: torch.dtype) -> None:
    """Rows are trees of so many nodes, or chunks; one request begins at the state before any token."""
    draw, lengths = torch.Generator().manual_seed(nodes or 0), (7, 1, 2)
    shape = (2, nodes) if nodes else (1, sum(lengths))
    mask: AttnMask | ChunkMask = ChunkMask(lengths, torch.tensor([0, *lengths]).cumsum(0))
    if nodes:
        mask = AttnMask(torch.stack([mask_of(tree(draw, nodes, 32, 0.5)) for _ in range(2)]))
    slots = torch.tensor([3, 0] if nodes else [1, 3, 2])
    heads = delta_heads(grouped=grouped, scaled=scaled, dtype=dtype)
    product, gates = products(shape[0] * shape[1], scaled=scaled, dtype=dtype)
    gates[0, 0] = 60.0  # softplus is the number itself, and the sigmoid 1
    states = some(4, CHANNELS, TAPS - 1, seed=6).to(dtype)

    def made(ops: Any, put: Any) -> tuple[Tensor, ...]:
        sizes = (CHANNELS,), (KEYS, KEY), (VALUES, VALUE), (VALUES,), (VALUES,)
        inputs, k, v, g, beta = (put(torch.full((*shape, *size), torch.nan, dtype=dtype)) for size in sizes)
        rows = DeltaRows(k, v, g.float(), beta)
        given = product, gates, heads, states, slots
        q = ops.delta_inputs(*map(put, given), put_mask(mask, put), inputs, rows)
        return q, inputs, rows.k, rows.v, rows.g, rows.beta

    for ours, expected in zip(made(gates_launch, there), made(gates_reference, lambda x: x), strict=True):
        assert ours.shape == expected.shape
        bound = BOUND[expected.dtype]
        torch.testing.assert_close(ours.cpu(), expected, rtol=bound, atol=bound)


def put_mask(mask: AttnMask | ChunkMask, put: Any) -> AttnMask | ChunkMask:
    if isinstance(mask, ChunkMask):
        return replace(mask, starts=put(mask.starts))
    return AttnMask(put(mask.allowed))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_gated_norm(grouped: bool, scaled: bool, dtype: torch.dtype) -> None:
    heads = delta_heads(grouped=grouped, scaled=scaled, dtype=dtype)
    product, _ = products(ROWS, scaled=scaled, dtype=dtype)
    x, weight = some(ROWS, VALUES, VALUE, seed=7).to(dtype), some(VALUE, seed=8).to(dtype)
    found = gates_launch.gated_norm(there(x), there(product), there(weight), EPS, there(heads))
    assert_same(found, gates_reference.gated_norm(x, product, weight, EPS, heads))


def test_quantized_results() -> None:
    """Numbers that FP8 has, and some that saturate; memory behind the rows is not written."""
    x = (torch.arange(2 * HQ * SIZE) % 8 + 8.0).view(2, HQ, SIZE)
    open_gates, shut = torch.full((2, 2 * HQ * SIZE), 100.0), torch.tensor(1.0)
    x[1] *= 1e4
    heads = Heads(HQ, HKV, SIZE, EPS, gated=True)
    room = there(torch.zeros(3, HQ * SIZE).to(torch.float8_e4m3fn))
    found = gates_launch.gate_heads(there(x), there(open_gates), heads, scale=there(shut), out=room[:2])
    assert found.data_ptr() == room.data_ptr()
    assert room.cpu().float().tolist() == [x[0].flatten().tolist(), [448.0] * HQ * SIZE, [0.0] * HQ * SIZE]
    of = delta_heads(grouped=False, scaled=False, dtype=torch.float32)
    product = torch.full((2, CHANNELS + VALUES * VALUE), 100.0)  # silu(100) is 100
    ones, room = torch.ones(2, VALUES, VALUE), there(torch.zeros(3, VALUES * VALUE).to(torch.float8_e4m3fn))
    given = there(ones), there(product), there(4 * ones[0, 0]), 3.0, there(of)
    gates_launch.gated_norm(*given, scale=there(shut * 25), out=room[:2])
    assert room.cpu().float().tolist() == [[8.0] * VALUES * VALUE] * 2 + [[0.0] * VALUES * VALUE]
