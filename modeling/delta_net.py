"""A layer whose token mixer is a gated delta net: a recurrent state in place of keys and values (Qwen3-Next, Qwen3.5).

    x ── in_proj_qkv ── convolution, silu ── q, k, v ──┐
    x ── in_proj_a ── g = -e^A_log softplus(a + dt) ───┤ delta rule ── RMSNorm · silu(z) ── out_proj
    x ── in_proj_b ── β = sigmoid(b) ──────────────────┘
    x ── in_proj_z ── z

The op and its formula are `d2sd.plugins.delta_rule`. Parameter names are those of transformers' Qwen3.5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.config import BodyConfig, DeltaConfig
from d2sd.modeling.feed_forward import sigmoid
from d2sd.modeling.layers import RMSNorm, feed_forward, norm_of
from d2sd.modeling.state_pool import StatePass, StateRows
from d2sd.plugins.delta_rule import DeltaRows

# Shape letters: B requests, T rows, E hidden, Hk/Hv heads of keys and of values, Dk/Dv their sizes, C channels and W
# taps of the convolution.


class ShortConvolution(nn.Module):
    """The weight of a causal convolution of each channel, which `StatePass` computes."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class DeltaNet(nn.Module):
    """The projections around the delta rule."""

    def __init__(self, hidden: int, config: DeltaConfig, eps: float) -> None:
        super().__init__()
        self._config = config
        values = config.value_heads * config.value_size
        self._add_projections(hidden, config)
        self.conv1d = ShortConvolution(config.channels, config.taps)
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.norm = RMSNorm(config.value_size, eps)
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

    def forward(self, x: Tensor, layer: int, states: StatePass) -> tuple[Tensor, StateRows]:
        """x [B, T, E] -> (what the mixer adds [B, T, E], what its rows write into the states of `layer`)."""
        config = self._config
        inputs, z, b, a = self._projected(x)
        keys, values = config.key_heads * config.key_size, config.value_heads * config.value_size
        convolved = states.convolved(layer, inputs, self.conv1d.weight[:, 0])
        q, k, v = torch.split(convolved, [keys, keys, values], dim=-1)
        of_keys, of_values = (*x.shape[:-1], -1, config.key_size), (*x.shape[:-1], -1, config.value_size)
        rows = DeltaRows(k.view(of_keys), v.view(of_values), self._gates(a), sigmoid(b))
        out = self.norm(states.outputs(layer, q.view(of_keys), rows))
        z = z.reshape(of_values).float()
        return self.out_proj((out * (z * sigmoid(z))).to(x.dtype).flatten(-2)), StateRows(inputs, rows)

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


class DeltaLayer(nn.Module):
    """Pre-norm layer around a gated delta net."""

    def __init__(self, config: BodyConfig, index: int) -> None:
        super().__init__()
        assert config.delta is not None
        kind = JoinedDeltaNet if config.delta.joined else DeltaNet
        self.linear_attn = kind(config.hidden_size, config.delta, config.rms_norm_eps)
        self.mlp = feed_forward(config, index)
        self.input_layernorm = norm_of(config)
        self.post_attention_layernorm = norm_of(config)

    def forward(self, x: Tensor, index: int, states: StatePass) -> tuple[Tensor, StateRows]:
        """x [B, T, E] -> (x of the next layer, what the rows write into the states); `index` counts these layers."""
        branch, rows = self.linear_attn(self.input_layernorm(x), index, states)
        x = x + branch
        return x + self.mlp(self.post_attention_layernorm(x)), rows
