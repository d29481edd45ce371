"""Token mixers of layers on CUDA: joined products and the ops between them. Attention's are here."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.fp8 import Fp8Cache
from d2sd.modeling.fused_pass import Pass, Shared
from d2sd.modeling.layers import Attention, RMSNorm
from d2sd.modeling.product import Linear, Product
from d2sd.plugins.gated_layers import gate_heads
from d2sd.plugins.layer_ops import Heads

# Shape letters: R rows, E hidden.


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
    """A layer's attention. Its kernels are in `d2sd.modeling.fused`."""

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


def _weight(norm: nn.Module) -> Tensor | None:
    return norm.weight.detach() if isinstance(norm, RMSNorm) else None


def _scale(cache: nn.Module) -> Tensor | None:
    """[1], of FP8 pages."""
    return cache.scale.view(1) if isinstance(cache, Fp8Cache) else None
