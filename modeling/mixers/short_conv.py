"""Gated short convolutions: a state of a few inputs in place of keys and values (LFM2).

    x ── in_proj ── b, c, u;   b · u ── convolution ── · c ── out_proj

The convolution is causal, of each channel by itself, over a row and its nearest ancestors
(`d2sd.plugins.delta_rule.convolution`). Parameter names are those of transformers' LFM2. The states:

    convolution   [L, P, C, W - 1]   its last committed inputs b · u, in the model's type
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from d2sd.modeling.fused_layer import FusedMixer
from d2sd.modeling.layers import CosSin, Mixer
from d2sd.modeling.product import Linear, Product
from d2sd.modeling.state_pool import StatePass, StatePool, StateRows
from d2sd.plugins.cascade_attention import AttnMask
from d2sd.plugins.delta_rule import chunk_convolution, commit_convolution, convolution

if TYPE_CHECKING:
    from d2sd.modeling.config import BodyConfig
    from d2sd.modeling.fused_pass import Pass, Shared
    from d2sd.modeling.mixers.configs import ShortConvConfig

# Shape letters: B requests, T rows, E hidden, L layers, P states, C channels and W taps of the convolution.


class ConvolutionRows(StateRows):
    """The inputs of the convolution, [B, T, C]."""

    def commit(self, pool: StatePool, state_ids: Tensor, path: Tensor, count: Tensor) -> None:
        commit_convolution(self.tensors[0], pool.tensors[0], state_ids, path, count)


class Convolution(nn.Module):
    """Weight and bias of a causal convolution of each channel, which the op computes."""

    bias: nn.Parameter | None

    def __init__(self, config: ShortConvConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.channels, 1, config.taps))
        self.register_parameter("bias", nn.Parameter(torch.empty(config.channels)) if config.bias else None)

    def forward(self, x: Tensor, index: int, states: StatePass) -> Tensor:
        """x [B, T, C], of chunks [1, N, C], which advance the states of layer `index` -> the same shape."""
        (inputs,), weight = states.of(index), self.weight[:, 0]
        if isinstance(states.mask, AttnMask):
            return convolution(x, weight, inputs, states.ids, states.mask, self.bias, silu=False)
        return chunk_convolution(x, weight, inputs, states.ids, states.mask, self.bias, silu=False)


class ShortConv(Mixer):
    """The projections and gates around the convolution."""

    recurrent = True

    def __init__(self, config: ShortConvConfig, body: BodyConfig) -> None:
        super().__init__()
        hidden = body.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * config.channels, bias=config.bias)
        self.conv = Convolution(config)
        self.out_proj = nn.Linear(config.channels, hidden, bias=config.bias)

    def groups(self, *, exact: bool) -> tuple[tuple[nn.Module, ...], ...]:
        return (self.in_proj,), (self.out_proj,)

    def forward(self, x: Tensor, cos_sin: CosSin, index: int, memory: StatePass) -> tuple[Tensor, ConvolutionRows]:
        b, c, u = self.in_proj(x).chunk(3, dim=-1)
        inputs = b * u
        return self.out_proj(c * self.conv(inputs, index, memory)), ConvolutionRows((inputs,))


class FusedShortConv(FusedMixer):
    """A gated short convolution on CUDA."""

    def __init__(self, mixer: ShortConv, config: ShortConvConfig, dtype: torch.dtype, *, exact: bool) -> None:
        (inner,), (out,) = mixer.groups(exact=exact)
        self.joint = Product.joint((inner,), dtype, exact=exact)
        self.out = Product([cast("Linear", out)], dtype, exact=exact, has_room=False)
        self._conv = mixer.conv

    def __call__(self, index: int, normed: Tensor, out: Pass, shared: Shared) -> Tensor:
        rows = out.state_rows(index).tensors[0]
        assert shared.states is not None
        b, c, u = self.joint(normed).view(*rows.shape[:-1], -1).chunk(3, dim=-1)
        torch.mul(b, u, out=rows)
        added: Tensor = self.out((c * self._conv(rows, index, shared.states)).flatten(0, 1))
        return added
