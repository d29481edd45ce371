"""The ops of gated attention and of gated delta nets in plain PyTorch: their specification, and their CPU path.

Every rounding stands where `modeling/layers.py` and `modeling/delta_net.py` round.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule import DeltaRows, convolution
from d2sd.plugins.dispatch import op
from d2sd.plugins.gated_layers.delta_heads import DeltaHeads
from d2sd.plugins.layer_ops.reference import OP, add_rms_norm
from d2sd.plugins.layer_ops.types import Heads
from d2sd.plugins.shared.fp8 import stored

# Shape letters as in __init__.py.


def _sigmoid(x: Tensor) -> Tensor:
    """In fp64 for the reason that `modeling/feed_forward.py` gives."""
    return torch.sigmoid(x.double()).to(x.dtype)


@op(OP, loaded=True)
def gate_heads(
    x: Tensor, product: Tensor, heads: Heads, *, scale: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Heads [R, Hq, D] behind attention, times the sigmoids of their gates -> [R, Hq·D].

    Args:
        product: [R, 2·Hq·D + ...], of which `qk_norm_rope` took the queries; strided by row.
        heads: of one layer, `gated`.
        scale: 0-dim fp32; with it the result is quantized.
        out: [R, Hq·D], contiguous, of the result's type; receives the result. None: a new tensor.
    """
    columns = heads.parts[0]
    gates = product[:, :columns]
    if heads.scales is not None:
        gates = gates * heads.scales[0, 0]
    gates = gates.to(x.dtype)
    if heads.bias is not None:
        gates = gates + heads.bias[0, :columns]
    return stored((x * _sigmoid(gates.reshape(len(x), -1, heads.size)[:, 1::2])).flatten(1), scale, out)


@op(OP, loaded=True)
def delta_inputs(
    product: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    states: Tensor,
    slots: Tensor,
    mask: AttnMask | ChunkMask,
    inputs: Tensor,
    rows: DeltaRows,
) -> Tensor:
    """Queries [B, T, Hk, Dk] of a gated delta net, of chunks [1, N, Hk, Dk], and what its rows write into states.

    The convolution is `d2sd.plugins.delta_rule.convolution`; log gates are decay · softplus(a + bias), and the
    weights of new values sigmoid(b).

    Args:
        product: [R, C + Hv·Dv], q, k, v and z of the rows, strided by row; or as `heads.grouped` says. Fp32 sums of FP8
            values where `heads.scales`, as `gates`.
        gates: [R, 2·Hv], b and a, strided by row.
        states: [P, C, W - 1] of the convolution, of this layer; read at `slots` [B].
        mask: of a tree, whose ancestors come before their descendants, or of chunks.
        inputs: [B, T, C], receives what the convolution reads.
        rows: of one layer, receive the rest.
    """
    of_convolution, _ = _parts(product, heads, inputs.dtype)
    b, a = _gates(gates, heads, inputs.dtype)
    inputs.copy_(of_convolution.view_as(inputs))
    mixed = convolution.reference(inputs, heads.convolution, states, slots, mask)
    keys = heads.keys * heads.key_size
    q, k, v = torch.split(mixed, [keys, keys, heads.values * heads.value_size], -1)
    steps = a.float() + heads.bias.float()
    log_gates = heads.decay * F.softplus(steps.double()).float()
    for into, made in zip((rows.k, rows.v, rows.g, rows.beta), (k, v, log_gates, _sigmoid(b)), strict=True):
        into.copy_(made.reshape(into.shape))
    return q.reshape(rows.k.shape)


@op(OP, loaded=True)
def gated_norm(
    x: Tensor,
    product: Tensor,
    weight: Tensor,
    eps: float,
    heads: DeltaHeads,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm of each head of x [R, Hv, Dv], times silu(z) -> [R, Hv·Dv].

    Args:
        product: as of `delta_inputs`.
        weight: [Dv].
        scale, out: as of `gate_heads`.
    """
    gates = _parts(product, heads, x.dtype)[1].float()
    normed = add_rms_norm.reference(x.flatten(0, 1), None, weight, eps).view_as(x)
    return stored((normed * (gates * _sigmoid(gates)).view_as(x)).to(x.dtype).flatten(1), scale, out)


def _parts(product: Tensor, heads: DeltaHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs of the convolution [R, C], and z [R, Hv·Dv]."""
    values, sizes = heads.values * heads.value_size, [heads.channels, heads.values * heads.value_size]
    product = product[:, : sum(sizes)]
    if heads.grouped:
        group = [heads.key_size, heads.key_size, *(2 * (values // heads.keys,))]
        by_keys = torch.split(product.reshape(len(product), heads.keys, -1), group, -1)
        product = torch.cat([part.flatten(1) for part in by_keys], -1)
    of_convolution, z = torch.split(product, sizes, -1)
    if heads.scales is not None:
        of_convolution, z = of_convolution * heads.scales[0], z * heads.scales[1]
    return of_convolution.to(dtype), z.to(dtype)


def _gates(gates: Tensor, heads: DeltaHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """b and a [R, Hv] each."""
    by_keys = gates.reshape(len(gates), heads.keys if heads.grouped else 1, -1)
    b, a = (part.flatten(1) for part in by_keys.chunk(2, -1))
    if heads.scales is not None:
        b, a = b * heads.scales[2], a * heads.scales[3]
    return b.to(dtype), a.to(dtype)
