"""Launches the kernels, as `layer_ops/triton/launch.py` does: shapes alone decide how, and nothing is read."""

# Triton has no types, and may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from triton import next_power_of_2 as power

from d2sd.plugins.cascade_attention import AttnMask
from d2sd.plugins.gated_layers.delta_heads import DeltaHeads
from d2sd.plugins.gated_layers.triton.kernel import delta_inputs_kernel, gate_heads_kernel, gated_norm_kernel
from d2sd.plugins.layer_ops.triton.launch import INTERPRET, OPTIONS, written

# Shape letters as in d2sd/plugins/gated_layers/__init__.py.

#: Numbers of one program, in one warp: sixteen a thread, as of `qk_norm_rope`.
NUMBERS = 512


def gate_heads(x, product, heads, *, scale=None, out=None):
    rows, count, size = x.shape
    assert x.is_contiguous()
    out = written((rows, count * size), x.dtype, x.device, scale, out)
    constants = block_constants(count, size)
    gate_heads_kernel[rows, triton.cdiv(count, constants["BLOCK"])](
        x, product, heads.bias, heads.scales, out, scale, product.stride(0),
        HEADS=count, SIZE=size, **constants, num_warps=1, **OPTIONS,
    )  # fmt: skip
    return out


def gated_norm(x, product, weight, eps, heads, *, scale=None, out=None):
    rows, count, size = x.shape
    assert x.is_contiguous()
    out = written((rows, count * size), x.dtype, x.device, scale, out)
    constants, (first, group, apart) = block_constants(count, size), heads.gates
    gated_norm_kernel[rows, triton.cdiv(count, constants["BLOCK"])](
        x, product, weight, heads.scales, out, scale, product.stride(0),
        EPS=eps, HV=count, SIZE=size, GROUP=group, FIRST=first, APART=apart, **constants, num_warps=1, **OPTIONS,
    )  # fmt: skip
    return out


@cache
def block_constants(heads: int, size: int) -> dict[str, Any]:
    """Compile-time constants of the kernels over some heads of this size."""
    lanes = power(size)
    return {"BLOCK": min(power(heads), max(1, NUMBERS // lanes)), "LANES": lanes, "INTERPRET": INTERPRET}


def delta_inputs(product, gates, heads, states, slots, mask, inputs, rows):
    tensors = inputs, rows.k, rows.v, rows.g, rows.beta
    assert all(x.is_contiguous() for x in (*tensors, states, heads.convolution))
    assert product.stride(1) == gates.stride(1) == 1
    words, starts, longest = None, None, inputs.shape[1]
    if isinstance(mask, AttnMask):
        words = mask.words
    else:
        starts, longest = mask.starts, max(mask.lengths)
    q = torch.empty_like(rows.k)
    total, constants = 2 * heads.keys + heads.values, delta_constants(heads_of(heads), longest, starts is None)
    delta_inputs_kernel[longest, triton.cdiv(total, constants["BLOCK"]), len(slots)](
        product, gates, heads.convolution, heads.decay, heads.bias, heads.scales, states, slots.contiguous(), words,
        starts, q, rows.k, rows.v, rows.g, rows.beta, inputs, longest, product.stride(0), gates.stride(0),
        TAPS=heads.convolution.shape[1], **constants, num_warps=1, **OPTIONS,
    )  # fmt: skip
    return q


def heads_of(heads: DeltaHeads) -> tuple[int, int, int, int, bool]:
    """Hk, Hv, Dk, Dv, and whether columns are grouped."""
    return heads.keys, heads.values, heads.key_size, heads.value_size, heads.grouped


@cache
def delta_constants(heads: tuple[int, int, int, int, bool], rows: int, tree: bool) -> dict[str, Any]:
    """Compile-time constants of `delta_inputs_kernel`, of `rows` of a request: a tree's ancestors are looked for."""
    keys, values, key_size, value_size, grouped = heads
    names = {"HK": keys, "HV": values, "DK": key_size, "DV": value_size, "GROUPED": grouped}
    block = block_constants(2 * keys + values, max(key_size, value_size))
    return names | block | {"PADDED": power(rows) if tree else 1}
