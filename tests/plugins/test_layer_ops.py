"""The ops between a layer's products: against loops over numbers, and bit for bit against the modules they replace."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.modeling.config import RopeConfig
from d2sd.modeling.fp8 import Fp8Cache
from d2sd.modeling.layers import RMSNorm, Rotary, rotate
from d2sd.plugins.layer_ops import (
    Behind,
    Front,
    Heads,
    add_rms_norm,
    embed_norm_rope,
    qk_norm_rope,
    quantize,
    rope_tables,
    silu_mul,
)
from d2sd.plugins.shared.fp8 import to_pages

# Shape letters as in plugins/layer_ops/__init__.py. No two sizes are equal, and none is a power of two.
ROWS, WIDTH, LAYERS, HQ, HKV, SIZE, EPS = 5, 37, 3, 6, 2, 22, 1e-3
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads_of(layers: int, queries: int, *, norms: bool, fp8: bool, dtype: torch.dtype = torch.float32) -> Heads:
    columns = (queries + 2 * HKV) * SIZE
    return Heads(
        queries,
        HKV,
        SIZE,
        EPS,
        q_norm=some(SIZE, seed=1).to(dtype) if norms and queries else None,
        k_norm=some(layers, SIZE, seed=2).to(dtype) if norms else None,
        bias=some(layers, columns, seed=3).to(dtype) if fp8 else None,
        scales=some(layers, 3, seed=4).abs() if fp8 else None,
    )


def products(layers: int, queries: int) -> Tensor:
    return some(layers, ROWS, (queries + 2 * HKV) * SIZE, seed=5)


def tables(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** -(torch.arange(SIZE // 2) / (SIZE // 2))
    return rope_tables(torch.tensor([0, 7, 3, 90_001, 12]), frequencies, 1.1, dtype)


def beginning(
    width: int, *, behind: bool, context: bool, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Any, ...], Front | None]:
    """Arguments of `embed_norm_rope`: two requests with three tokens each, in part behind four rows of context."""
    tokens, start, steps = torch.tensor([[5, 0, 8], [8, 1, 5]]), torch.tensor([90_001, 12]), torch.tensor([0, 3, 1])
    positions: Tensor | Behind = Behind(start, steps.expand(2, 3))
    if not behind:
        positions = torch.tensor([[0, 7, 3], [90_001, 12, 4]])
    # With this seed no normed number of 37 columns is so near the middle of two 16-bit numbers that another order of
    # its sum may round it to the other: `assert_same` allows a share, which of so few numbers is none.
    table, weight = some(9, width, seed=5).to(dtype), some(width, seed=2).to(dtype)
    frequencies = 100.0 ** -(torch.arange(SIZE // 2) / (SIZE // 2))
    front = Front(some(4, width).to(dtype), some(width, seed=1).to(dtype), torch.tensor([[2, 9], [6, 700]]))
    return (tokens, table, weight, EPS, positions, frequencies, 1.1), front if context else None


def looped_norm(line: list[float], weight: list[float]) -> list[float]:
    root = math.sqrt(sum(number * number for number in line) / len(line) + EPS)
    return [factor * number / root for number, factor in zip(line, weight, strict=True)]


def looped_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope` in fp64, head by head: q [R, Hq, D], k and v [L, R, Hkv, D]."""
    layers, rows, _ = qkv.shape
    q = torch.zeros(rows, heads.queries, heads.size, dtype=torch.float64)
    k, v = torch.zeros(2, layers, rows, heads.kv, heads.size, dtype=torch.float64)
    for layer in range(layers):
        for row in range(rows):
            for head in range(heads.queries + 2 * heads.kv):
                part = 0 if head < heads.queries else 1 if head < heads.queries + heads.kv else 2
                columns = range(head * heads.size, (head + 1) * heads.size)
                line = [float(qkv[layer, row, column]) for column in columns]
                if heads.scales is not None:
                    line = [number * float(heads.scales[layer, part]) for number in line]
                if heads.bias is not None:
                    line = [n + float(heads.bias[layer, c]) for n, c in zip(line, columns, strict=True)]
                norm = (heads.q_norm, None if heads.k_norm is None else heads.k_norm[layer], None)[part]
                if norm is not None:
                    line = looped_norm(line, norm.tolist())
                if part < 2:
                    half = heads.size // 2
                    c, s = cos[row].tolist(), sin[row].tolist()
                    line = [line[i] * c[i] - line[i + half] * s[i] for i in range(half)] + [
                        line[i + half] * c[i] + line[i] * s[i] for i in range(half)
                    ]
                out = (q, k[layer], v[layer])[part]
                out[row, head - (0, heads.queries, heads.queries + heads.kv)[part]] = torch.tensor(line)
    return q, k, v


def made_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.full((2, len(qkv), ROWS, HKV, SIZE), torch.nan, dtype=cos.dtype)
    return qk_norm_rope(qkv, cos, sin, heads, k, v), k, v


HEADS = [
    (1, HQ, True, False),
    (1, HQ, False, False),
    (1, HQ, True, True),
    (LAYERS, 0, True, False),
    (LAYERS, 0, True, True),
]


@pytest.mark.parametrize(("layers", "queries", "norms", "fp8"), HEADS)
def test_heads_are_what_loops_make(layers: int, queries: int, norms: bool, fp8: bool) -> None:
    arguments = products(layers, queries), *tables(), heads_of(layers, queries, norms=norms, fp8=fp8)
    for found, expected in zip(made_heads(*arguments), looped_heads(*arguments), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("added", [False, True])
def test_a_norm_is_what_loops_make(added: bool) -> None:
    x, branch, weight = some(ROWS, 2 * WIDTH)[:, WIDTH:], some(ROWS, WIDTH, seed=1), some(WIDTH, seed=2)
    total = torch.empty(ROWS, 3 * WIDTH)[:, WIDTH : 2 * WIDTH]
    found = add_rms_norm(x, branch if added else None, weight, EPS, total=total)
    summed = x.double() + branch.double() if added else x.double()
    expected = [looped_norm(line, weight.tolist()) for line in summed.tolist()]
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=2e-6)
    if added:
        torch.testing.assert_close(total.double(), summed, atol=1e-6, rtol=1e-6)
    blocks = x.repeat(2, 1), branch.repeat(2, 1) if added else None
    assert torch.equal(add_rms_norm(*blocks, weight, EPS, block=ROWS), found[1:].repeat(2, 1))
    rows = torch.zeros(ROWS + 1, WIDTH)
    assert add_rms_norm(x, branch if added else None, weight, EPS, out=rows[1:]).data_ptr() == rows[1:].data_ptr()
    assert torch.equal(rows[1:], found)


@pytest.mark.parametrize(("behind", "context"), [(True, True), (True, False), (False, False)])
def test_a_beginning_is_what_loops_make(behind: bool, context: bool) -> None:
    given, front = beginning(WIDTH, behind=behind, context=context)
    tokens, table, weight, _, _, frequencies, factor = given
    x, normed, cos, sin = embed_norm_rope(*given, front=front)
    embedded = [table[token].tolist() for token in tokens.flatten().tolist()]
    assert x.tolist() == embedded
    lines, places = [(line, weight) for line in embedded], [90_001, 90_004, 90_002, 12, 15, 13]
    if not behind:
        places = [0, 7, 3, 90_001, 12, 4]
    if front is not None:
        lines = [*((line, front.weight) for line in front.x.tolist()), *lines]
        places = [2, 9, 6, 700, *places]
    expected = torch.tensor([looped_norm(line, factors.tolist()) for line, factors in lines])
    torch.testing.assert_close(normed, expected, atol=2e-6, rtol=2e-6)
    angles = torch.tensor([[float(torch.tensor(float(p)) * f) for f in frequencies] for p in places])
    torch.testing.assert_close(cos, angles.cos() * factor, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(sin, angles.sin() * factor, atol=1e-6, rtol=1e-6)


def test_the_gate_is_what_loops_make() -> None:
    gate_up, scales = some(ROWS, 2 * WIDTH) * 5, torch.tensor([0.5, 3.0])
    found = silu_mul(gate_up, torch.float32, scales=scales)
    for row in range(ROWS):
        for column in range(WIDTH):
            gate, up = 0.5 * float(gate_up[row, column]), 3 * float(gate_up[row, WIDTH + column])
            assert float(found[row, column]) == pytest.approx(gate / (1 + math.exp(-gate)) * up, rel=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_are_those_of_the_modules(dtype: torch.dtype) -> None:
    norm = RMSNorm(WIDTH, EPS).to(dtype)
    norm.weight.data = some(WIDTH, seed=2).to(dtype)
    x, branch = some(ROWS, WIDTH).to(dtype), some(ROWS, WIDTH, seed=1).to(dtype)
    total = torch.empty_like(x)
    with torch.no_grad():
        assert torch.equal(add_rms_norm(x, branch, norm.weight, EPS, total=total), norm(x + branch))
    assert torch.equal(total, x + branch)
    gate_up = some(ROWS, 2 * WIDTH).to(dtype) * 5
    assert torch.equal(silu_mul(gate_up, dtype), F.silu(gate_up[:, :WIDTH]) * gate_up[:, WIDTH:])
    rotary, positions = Rotary(RopeConfig(1e4), SIZE), torch.tensor([[0, 7, 3, 90_001, 12]])
    cos_sin = rotary(positions, dtype)
    heads, qkv = heads_of(1, HQ, norms=True, fp8=False, dtype=dtype), products(1, HQ).to(dtype)
    q, k, v = made_heads(qkv, *rotary.tables(positions, dtype), heads)
    parts = [part.view(1, ROWS, -1, SIZE) for part in torch.split(qkv, heads.parts, -1)]
    for found, part, weight in ((q[None], parts[0], heads.q_norm), (k, parts[1], heads.k_norm)):
        norm = RMSNorm(SIZE, EPS)
        assert weight is not None
        norm.weight.data = weight.flatten()
        with torch.no_grad():
            assert torch.equal(found, rotate(norm(part), cos_sin))
    assert torch.equal(v, parts[2])


@pytest.mark.parametrize("dtype", TYPES)
def test_fp8_rounds_as_the_modules_do(dtype: torch.dtype) -> None:
    scale = torch.tensor(0.013)
    x, weight = some(ROWS, WIDTH).to(dtype), some(WIDTH, seed=2).to(dtype)
    for found, expected in (
        (quantize(x, scale), x),
        (add_rms_norm(x, None, weight, EPS, scale=scale), add_rms_norm(x, None, weight, EPS)),
        (
            silu_mul(some(ROWS, 2 * WIDTH).to(dtype), dtype, scale=scale),
            silu_mul(some(ROWS, 2 * WIDTH).to(dtype), dtype),
        ),
    ):
        assert torch.equal(found.view(torch.uint8), to_pages(expected, scale).view(torch.uint8))
    caches, plain = (Fp8Cache(), Fp8Cache()), heads_of(1, HQ, norms=True, fp8=False, dtype=dtype)
    caches[0].scale, caches[1].scale = scale, scale / 3
    k_scale, v_scale = (cache.scale.view(1) for cache in caches)
    paged = replace(plain, k_scale=k_scale, v_scale=v_scale)
    qkv, angles = products(1, HQ).to(dtype), tables(dtype)
    (q, k, v), (plain_q, plain_k, plain_v) = (made_heads(qkv, *angles, heads) for heads in (paged, plain))
    assert torch.equal(q, plain_q)
    assert torch.equal(k, caches[0](plain_k))
    assert torch.equal(v, caches[1](plain_v))
