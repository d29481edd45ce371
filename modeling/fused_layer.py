"""One layer on CUDA: its joined products, the parameters of the ops between them, and its feed-forward network."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.feed_forward import FeedForward
from d2sd.modeling.fp8 import Fp8Cache
from d2sd.modeling.layers import Layer, RMSNorm
from d2sd.modeling.product import Linear, Product
from d2sd.plugins.layer_ops import Heads, add_rms_norm, silu_mul

# Shape letters: R rows, E hidden, I intermediate.


class FusedLayer:
    """One layer's products and parameters, or with the feed-forward network of `target`."""

    def __init__(
        self, layer: Layer, body: BodyConfig, dtype: torch.dtype, target: FusedLayer | None, *, exact: bool
    ) -> None:
        attention = layer.self_attn
        self.reduce = layer.reduce
        self.input_norm = layer.input_layernorm.weight.detach()
        self.post_norm = layer.post_attention_layernorm.weight.detach()
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.qkv = Product(projections, dtype, exact=exact)
        sizes = [part.weight.shape[0] for part in projections]
        for part, weight in zip(projections, torch.split(self.qkv.weight, sizes), strict=True):
            part.weight.data = weight  # a view: weights are held once, also by a model that keeps its layers
        self.o = Product([attention.o_proj], dtype, exact=exact)
        shared = None if target is None else target.feed_forward
        self.feed_forward: SwiGLU | Unfused = shared or _feed_forward(layer.mlp, dtype, exact=exact)
        self.sinks = None if attention.sinks is None else attention.sinks.detach()
        norms = [_weight(norm) for norm in (attention.q_norm, attention.k_norm)]
        caches = [_scale(cache) for cache in (attention.k_cache, attention.v_cache)]
        scales, bias = self.qkv.scales, None if self.qkv.input_scale is None else self.qkv.bias
        self.heads = Heads(
            body.num_heads,
            body.num_kv_heads,
            body.head_dim,
            body.rms_norm_eps,
            q_norm=norms[0],
            k_norm=None if norms[1] is None else norms[1][None],
            bias=None if bias is None else bias[None],
            scales=None if scales is None else scales[None],
            k_scale=caches[0],
            v_scale=caches[1],
        )

    @property
    def products(self) -> list[Product]:
        """Its products, in the order in which a pass computes them."""
        inner = self.feed_forward
        return [self.qkv, self.o, *((inner.gate_up, inner.down) if isinstance(inner, SwiGLU) else ())]

    def mlp(self, x: Tensor, branch: Tensor | None, eps: float, total: Tensor) -> Tensor:
        """The feed-forward network's output [R, E] for x + branch, which `total` receives."""
        inner = self.feed_forward
        scale, room = inner.input_scale, inner.room(len(x))
        normed = add_rms_norm(x, branch, self.post_norm, eps, total=total, scale=scale, out=room)
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


def _weight(norm: nn.Module) -> Tensor | None:
    return norm.weight.detach() if isinstance(norm, RMSNorm) else None


def _scale(cache: nn.Module) -> Tensor | None:
    """[1], of FP8 pages."""
    return cache.scale.view(1) if isinstance(cache, Fp8Cache) else None
