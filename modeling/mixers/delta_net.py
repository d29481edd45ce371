"""Gated delta nets: a recurrent state in place of keys and values (Qwen3-Next, Qwen3.5).

    x ── in_proj_qkv ── convolution, silu ── q, k, v ──┐
    x ── in_proj_a ── g = -e^A_log softplus(a + dt) ───┤ delta rule ── RMSNorm · silu(z) ── out_proj
    x ── in_proj_b ── β = sigmoid(b) ──────────────────┘
    x ── in_proj_z ── z

The op and its formula are `d2sd.plugins.delta_rule`. Parameter names are those of transformers' Qwen3.5. The states:

    recurrent     [L, P, Hv, Dk, Dv] fp32
    convolution   [L, P, C, W - 1]   the last committed inputs of the short convolution, in the model's type
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.feed_forward import sigmoid
from d2sd.modeling.fused_layer import FusedMixer
from d2sd.modeling.layers import CosSin, Mixer, RMSNorm
from d2sd.modeling.product import Linear, Product, unjoinable
from d2sd.modeling.state_pool import StatePass, StatePool, StateRows
from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule import (
    DeltaRows,
    chunk_convolution,
    chunk_delta_rule,
    commit_chunk_inputs,
    commit_convolution,
    commit_delta_rule,
    convolution,
    tree_delta_rule,
)
from d2sd.plugins.gated_layers import DeltaHeads, delta_inputs, gated_norm

if TYPE_CHECKING:
    from d2sd.modeling.config import BodyConfig
    from d2sd.modeling.fused_pass import Pass, Shared
    from d2sd.modeling.mixers.configs import DeltaConfig

# Shape letters: B requests, T rows, R of all, E hidden, L gated delta nets, P states, Hk/Hv heads of keys and values,
# Dk/Dv their sizes, C channels and W taps of the convolution.


class DeltaStateRows(StateRows):
    """The inputs of the convolution [B, T, C], and `DeltaRows`."""

    @property
    def inputs(self) -> Tensor:
        """The inputs of the convolution."""
        return self.tensors[0]

    @property
    def delta(self) -> DeltaRows:
        """The rows of the delta rule."""
        return DeltaRows(*self.tensors[1:])

    def commit(self, pool: StatePool, state_ids: Tensor, path: Tensor, count: Tensor) -> None:
        recurrent, convolution = pool.tensors
        commit_delta_rule(self.delta, recurrent, state_ids, path, count)
        commit_convolution(self.inputs, convolution, state_ids, path, count)


def delta_outputs(states: StatePass, layer: int, q: Tensor, rows: DeltaRows) -> Tensor:
    """q [B, T, Hk, Dk] and what its rows write -> [B, T, Hv, Dv], by the delta rule from the states of `layer`."""
    recurrent, _ = states.of(layer)
    if isinstance(states.mask, AttnMask):
        return tree_delta_rule(q, rows, recurrent, states.ids, states.mask, exact=states.exact)
    return chunk_delta_rule(q, rows, recurrent, states.ids, states.mask, exact=states.exact)


class ShortConvolution(nn.Module):
    """The weight of a causal convolution of each channel, and of its silu."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class DeltaNet(Mixer):
    """The projections around the delta rule."""

    recurrent = True

    def __init__(self, config: DeltaConfig, body: BodyConfig) -> None:
        super().__init__()
        self._config, hidden = config, body.hidden_size
        values = config.value_heads * config.value_size
        self._add_projections(hidden, config)
        self.conv1d = ShortConvolution(config.channels, config.taps)
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.norm = RMSNorm(config.value_size, body.rms_norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def _add_projections(self, hidden: int, config: DeltaConfig) -> None:
        self.in_proj_qkv = nn.Linear(hidden, config.channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, config.value_heads * config.value_size, bias=False)
        self.in_proj_b = nn.Linear(hidden, config.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, config.value_heads, bias=False)

    @property
    def projections(self) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
        """Projections of q, k, v and z, and of b and a, in the order in which `DeltaHeads` has their columns."""
        return (self.in_proj_qkv, self.in_proj_z), (self.in_proj_b, self.in_proj_a)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution [B, T, C], z [B, T, Hv·Dv], b and a [B, T, Hv]."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def groups(self, *, exact: bool) -> tuple[tuple[nn.Module, ...], ...]:
        """See `Mixer.groups`: the input projections are one product, or two where they cannot be one."""
        large, small = self.projections
        joint = (*large, *small)
        inner = (joint,) if unjoinable(joint, exact=exact) is None else (large, small)
        return (*inner, (self.out_proj,))

    def forward(self, x: Tensor, cos_sin: CosSin, index: int, memory: StatePass) -> tuple[Tensor, DeltaStateRows]:
        config = self._config
        inputs, z, b, a = self._projected(x)
        keys, values = config.key_heads * config.key_size, config.value_heads * config.value_size
        convolved = self._convolved(inputs, index, memory)
        q, k, v = torch.split(convolved, [keys, keys, values], dim=-1)
        of_keys, of_values = (*x.shape[:-1], -1, config.key_size), (*x.shape[:-1], -1, config.value_size)
        rows = DeltaRows(k.view(of_keys), v.view(of_values), self._gates(a), sigmoid(b))
        out = self.norm(delta_outputs(memory, index, q.view(of_keys), rows))
        z = z.reshape(of_values).float()
        written = DeltaStateRows((inputs, rows.k, rows.v, rows.g, rows.beta))
        return self.out_proj((out * (z * sigmoid(z))).to(x.dtype).flatten(-2)), written

    def _convolved(self, x: Tensor, index: int, states: StatePass) -> Tensor:
        """silu of the convolution of x [B, T, C], of chunks [1, N, C]."""
        (_, inputs), weight = states.of(index), self.conv1d.weight[:, 0]
        if isinstance(states.mask, AttnMask):
            return convolution(x, weight, inputs, states.ids, states.mask)
        return chunk_convolution(x, weight, inputs, states.ids, states.mask)

    def _gates(self, a: Tensor) -> Tensor:
        """Log gates [B, T, Hv] in fp32."""
        steps = a.float() + self.dt_bias.float()
        if not steps.is_cuda:  # in fp64 for the reason that `sigmoid` gives
            steps = steps.double()
        return -self.A_log.float().exp() * F.softplus(steps).float()


class JoinedDeltaNet(DeltaNet):
    """Qwen3-Next's: two projections, whose outputs are grouped by key heads: q, k, v and z of each, and b and a.

    They stay as they are stored, so that quantized ones are read like others; their outputs are put in order.
    """

    def _add_projections(self, hidden: int, config: DeltaConfig) -> None:
        values = config.value_heads * config.value_size
        self.in_proj_qkvz = nn.Linear(hidden, config.channels + values, bias=False)
        self.in_proj_ba = nn.Linear(hidden, 2 * config.value_heads, bias=False)

    @property
    def projections(self) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
        return (self.in_proj_qkvz,), (self.in_proj_ba,)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        config, size = self._config, self._config.key_size
        group = config.value_heads // config.key_heads
        qkvz = self.in_proj_qkvz(x).unflatten(-1, (config.key_heads, -1))
        ba = self.in_proj_ba(x).unflatten(-1, (config.key_heads, -1))
        q, k, v, z = (part.flatten(-2) for part in qkvz.split((size, size, *2 * (group * config.value_size,)), -1))
        b, a = (part.flatten(-2) for part in ba.split(group, -1))
        return torch.cat((q, k, v), -1), z, b, a


class FusedDeltaNet(FusedMixer):
    """A gated delta net on CUDA.

    Where b and a are not in the type of the other projections, they are a product of their own, and the joint one
    quantizes its input itself.
    """

    def __init__(self, net: DeltaNet, config: DeltaConfig, dtype: torch.dtype, *, exact: bool) -> None:
        *groups, out = net.groups(exact=exact)
        self.joint, *gates = (Product.joint(group, dtype, exact=exact) for group in groups)
        self._gates = gates[0] if gates else None
        self.out = Product(cast("Sequence[Linear]", out), dtype, exact=exact)
        self._norm, self._eps = net.norm.weight.detach(), net.norm.eps
        self._heads = DeltaHeads(
            config.key_heads,
            config.value_heads,
            config.key_size,
            config.value_size,
            net.conv1d.weight.detach()[:, 0].contiguous(),
            -net.A_log.detach().float().exp(),
            net.dt_bias.detach(),
            config.joined,
            self._scales(groups),
        )

    def _scales(self, groups: Sequence[Sequence[nn.Module]]) -> Tensor | None:
        """The scales of `DeltaHeads`."""
        products = [product for product in (self.joint, self._gates) if product is not None]
        if all(product.scales is None for product in products):
            return None
        ones = (self.joint.weight.new_ones(len(group), dtype=torch.float32) for group in groups)
        scales = (
            one if product.scales is None else product.scales for product, one in zip(products, ones, strict=True)
        )
        found = torch.cat(list(scales))
        return found if len(found) == 4 else found.repeat_interleave(2)

    @property
    def products(self) -> list[Product]:
        return [product for product in (self.joint, self._gates, self.out) if product is not None]

    @property
    def input_scale(self) -> Tensor | None:
        return self.joint.input_scale if self._gates is None else None

    def room(self, rows: int) -> Tensor | None:
        return self.joint.room(rows) if self._gates is None else None

    def __call__(self, index: int, normed: Tensor, out: Pass, shared: Shared) -> Tensor:
        heads, states, rows = self._heads, shared.states, cast("DeltaStateRows", out.state_rows(index))
        assert states is not None
        product = self.joint(normed)
        gates = product[:, -2 * heads.values :] if self._gates is None else self._gates(normed)
        q = _inputs(states, index, product, gates, heads, rows)
        mixed = delta_outputs(states, index, q, rows.delta).flatten(0, 1)
        scale, room = self.out.input_scale, self.out.room(len(normed))
        added: Tensor = self.out(gated_norm(mixed, product, self._norm, self._eps, heads, scale=scale, out=room))
        return added


def _inputs(
    states: StatePass, index: int, product: Tensor, gates: Tensor, heads: DeltaHeads, into: DeltaStateRows
) -> Tensor:
    """Queries [B, T, Hk, Dk] from the joint products of a layer, whose other results `into` receives; see
    `d2sd.plugins.gated_layers.delta_inputs`.
    """
    (_, inputs), mask = states.of(index), states.mask
    q = delta_inputs(product, gates, heads, inputs, states.ids, mask, into.inputs, into.delta)
    if isinstance(mask, ChunkMask):
        last = states.last_rows(mask, inputs.shape[-1], into.inputs.shape[1])
        commit_chunk_inputs(into.inputs, inputs, states.ids, last)
    return q
