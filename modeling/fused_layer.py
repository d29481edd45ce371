"""One layer on CUDA, and its feed-forward network."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.feed_forward import FeedForward
from d2sd.modeling.fused_mixer import FusedAttention, FusedMixer
from d2sd.modeling.fused_pass import Pass, Shared
from d2sd.modeling.layers import Layer
from d2sd.modeling.product import Linear, Product
from d2sd.plugins.layer_ops import add_rms_norm, silu_mul

# Shape letters: R rows, E hidden, I intermediate.


class FusedLayer:
    """One layer: what mixes its tokens, and its feed-forward network or that of `target`."""

    def __init__(
        self, layer: Layer, body: BodyConfig, dtype: torch.dtype, target: FusedLayer | None, *, exact: bool
    ) -> None:
        self.reduce = layer.reduce
        self.offset = body.norm_offset
        self.input_norm = layer.input_layernorm.weight.detach()
        self.post_norm = layer.post_attention_layernorm.weight.detach()
        self.mixer: FusedMixer
        if body.recurrent is not None and layer.mixer.recurrent:
            self.mixer = body.recurrent.code.fused(layer.mixer, body.recurrent, dtype, exact=exact)
        else:
            self.mixer = FusedAttention(layer.self_attn, body, dtype, exact=exact)
        shared = None if target is None else target.feed_forward
        self.feed_forward: SwiGLU | Unfused = shared or _feed_forward(layer.mlp, dtype, exact=exact)

    @property
    def products(self) -> list[Product]:
        """The layer's products, in the order in which a pass computes them."""
        inner = self.feed_forward
        return [*self.mixer.products, *((inner.gate_up, inner.down) if isinstance(inner, SwiGLU) else ())]

    def norm(self, x: Tensor, branch: Tensor | None, eps: float, total: Tensor | None, room: Tensor | None) -> Tensor:
        """The input of its mixer for x + branch [R, E], which `total` receives."""
        scale, offset = self.mixer.input_scale, self.offset
        return add_rms_norm(x, branch, self.input_norm, eps, total=total, scale=scale, out=room, offset=offset)

    def mix(self, index: int, normed: Tensor, out: Pass, shared: Shared) -> Tensor:
        """normed [R, E] -> what mixer `index` of its kind adds [R, E]."""
        added = self.mixer(index, normed, out, shared)
        return added if self.reduce is None else self.reduce(added)

    def mlp(self, x: Tensor, branch: Tensor | None, eps: float, total: Tensor) -> Tensor:
        """The feed-forward network's output [R, E] for x + branch, which `total` receives."""
        inner, offset = self.feed_forward, self.offset
        scale, room = inner.input_scale, inner.room(len(x))
        normed = add_rms_norm(x, branch, self.post_norm, eps, total=total, scale=scale, out=room, offset=offset)
        out: Tensor = inner(normed)
        return out if self.reduce is None else self.reduce(out)


class SwiGLU(nn.Module):
    """The joined products of a feed-forward network. Without parameters."""

    def __init__(self, products: tuple[tuple[nn.Module, ...], ...], dtype: torch.dtype, *, exact: bool) -> None:
        super().__init__()
        (gate, up), (down,) = cast("tuple[tuple[Linear, Linear], tuple[Linear]]", products)
        self.gate_up, self.down = Product([gate, up], dtype, exact=exact), Product([down], dtype, exact=exact)
        self._dtype = dtype
        for part, weight in zip((gate, up), self.gate_up.weight.chunk(2), strict=True):
            part.weight.data = weight  # a view, for drafters that borrow it and cannot be fused

    @property
    def input_scale(self) -> Tensor | None:
        return self.gate_up.input_scale

    @property
    def nbytes(self) -> int:
        return self.gate_up.weight.nbytes + self.down.weight.nbytes

    def room(self, rows: int) -> Tensor | None:
        """See `Product.room`."""
        return self.gate_up.room(rows)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, scales, down = self.gate_up(x), self.gate_up.scales, self.down
        gated = silu_mul(gate_up, self._dtype, scales=scales, scale=down.input_scale, out=down.room(len(x)))
        out: Tensor = down(gated)
        return out


class Unfused(nn.Module):
    """A feed-forward network without products that the kernels join: experts."""

    input_scale = None

    def __init__(self, module: FeedForward) -> None:
        super().__init__()
        self._module = (module,)  # a tuple, so that its parameters are not this module's

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._module[0].parameters())

    def room(self, rows: int) -> None:
        """See `Product.room`."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._module[0](x)
        return out


def _feed_forward(module: FeedForward, dtype: torch.dtype, *, exact: bool) -> SwiGLU | Unfused:
    products = module.products()
    return SwiGLU(products, dtype, exact=exact) if products else Unfused(module)
