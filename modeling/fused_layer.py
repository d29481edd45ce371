"""One layer on CUDA: what mixes its tokens, of which attention is here, and its feed-forward network.

Both are joined products and the ops between them, which `d2sd.modeling.fused` lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.feed_forward import FeedForward
from d2sd.modeling.fp8 import Fp8Cache
from d2sd.modeling.fused_pass import Pass, Shared
from d2sd.modeling.kv_pool import Rows
from d2sd.modeling.layers import Attention, Layer, RMSNorm, Rotary
from d2sd.modeling.product import Linear, Product
from d2sd.plugins.gated_layers import gate_heads
from d2sd.plugins.layer_ops import Heads, add_rms_norm, qk_norm_rope, silu_mul

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


class FusedMixer:
    """Attention, or a mixer with a recurrent state."""

    joint: Product  # of the input
    out: Product

    @property
    def products(self) -> list[Product]:
        """The mixer's products, in the order in which a pass computes them."""
        return [self.joint, self.out]

    @property
    def input_scale(self) -> Tensor | None:
        """The scale with which the norm before quantizes, if it does."""
        return self.joint.input_scale

    def room(self, rows: int) -> Tensor | None:
        """See `Product.room`."""
        return self.joint.room(rows)

    def __call__(self, index: int, normed: Tensor, out: Pass, shared: Shared) -> Tensor:
        """normed [R, E], unless `out` has those with its context -> what mixer `index` of its kind adds [R, E]."""
        raise NotImplementedError


class FusedAttention(FusedMixer):
    """A layer's attention."""

    def __init__(self, attention: Attention, body: BodyConfig, dtype: torch.dtype, *, exact: bool) -> None:
        self.joint = Product.joint((attention.q_proj, attention.k_proj, attention.v_proj), dtype, exact=exact)
        self.out = Product([cast("Linear", attention.o_proj)], dtype, exact=exact)
        self._sinks = None if attention.sinks is None else attention.sinks.detach()
        norms = [_weight(norm) for norm in (attention.q_norm, attention.k_norm)]
        caches = [_scale(cache) for cache in (attention.k_cache, attention.v_cache)]
        scales, bias = self.joint.scales, None if self.joint.input_scale is None else self.joint.bias
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
            rotary=body.rotary_dim,
            gated=body.output_gate,
            norm_offset=body.norm_offset,
        )

    def __call__(self, index: int, normed: Tensor, out: Pass, shared: Shared) -> Tensor:
        product = self.joint(normed if out.joint is None else out.joint)
        q, k, v = out.heads(index, self.heads, product, shared.cos, shared.sin)
        rows = q.shape[:2].numel()
        scale, room = self.out.input_scale, self.out.room(rows)
        if self.heads.gated:
            heads = shared.attend(index, q, k, v, sinks=self._sinks).flatten(0, 1)
            gated: Tensor = self.out(gate_heads(heads, product, self.heads, scale=scale, out=room))
            return gated
        room = None if room is None else room.view(q.shape)
        heads = shared.attend(index, q, k, v, scale, room, sinks=self._sinks)
        added: Tensor = self.out(heads.reshape(rows, -1))
        return added


class JoinedAttention:
    """The attention of a pass that rows join, which come after all of its own in [R + U, E]."""

    def __init__(self, out: Pass, rows: Rows, rotary: Rotary, attend: Callable[..., Tensor]) -> None:
        """`out` is of the pass's own rows, the first of `rows`; `attend` is of all."""
        _, batch, count, *heads = out.k.shape
        self._out, self._attend, self._counts = out, attend, [count, rows.positions.shape[1] - count]
        self._tables = [rotary.tables(part, out.k.dtype) for part in torch.split(rows.positions, self._counts, 1)]
        self._dropped = out.k.new_empty(2, batch, self._counts[1], *heads).unbind()  # K/V of one layer at a time

    def __call__(self, index: int, normed: Tensor, mixers: tuple[FusedMixer, FusedMixer]) -> Tensor:
        """normed [R + U, E] -> what layer `index` adds, by the projections of the pass and of rows that join."""
        both, batch, made = cast("tuple[FusedAttention, FusedAttention]", mixers), self._out.k.shape[1], []
        parts = torch.split(normed, [batch * count for count in self._counts])
        caches = (self._out.k[index], self._out.v[index]), self._dropped
        for mixer, part, table, (k, v) in zip(both, parts, self._tables, caches, strict=True):
            cache = k.flatten(0, 1)[None], v.flatten(0, 1)[None]
            q = qk_norm_rope(mixer.joint(part)[None], *table, mixer.heads, *cache)
            made.append((q.view(batch, -1, *q.shape[1:]), k, v))
        heads = self._attend(index, *(torch.cat(of_both, 1) for of_both in zip(*made, strict=True)))
        of_kinds = zip(both, torch.split(heads.flatten(2), self._counts, 1), strict=True)
        return torch.cat([mixer.out(part.flatten(0, 1)) for mixer, part in of_kinds])


def _weight(norm: nn.Module) -> Tensor | None:
    return norm.weight.detach() if isinstance(norm, RMSNorm) else None


def _scale(cache: nn.Module) -> Tensor | None:
    """[1], of FP8 pages."""
    return cache.scale.view(1) if isinstance(cache, Fp8Cache) else None


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
