"""Token mixers of layers on CUDA, attention or a gated delta net: joined products and the ops between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from d2sd.modeling.config import BodyConfig, DeltaConfig
from d2sd.modeling.delta_net import DeltaLayer, DeltaNet
from d2sd.modeling.fp8 import Fp8Cache, Fp8Linear
from d2sd.modeling.fused_pass import Pass, Shared
from d2sd.modeling.layers import Attention, Layer, RMSNorm
from d2sd.modeling.product import Linear, Product
from d2sd.modeling.quantized import ComputedLinear
from d2sd.plugins.gated_layers import DeltaHeads, gate_heads, gated_norm
from d2sd.plugins.layer_ops import Heads

# Shape letters: R rows, E hidden.


class FusedAttention:
    """A layer's attention. Its kernels are in `d2sd.modeling.fused`."""

    def __init__(self, attention: Attention, body: BodyConfig, dtype: torch.dtype, *, exact: bool) -> None:
        self.joint = _joined((attention.q_proj, attention.k_proj, attention.v_proj), dtype, exact=exact)
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
        """normed [R, E], unless `out` has those with its rows of context -> what attention `index` adds [R, E]."""
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


class FusedDeltaNet:
    """A gated delta net.

    Where b and a are not in the type of the other projections, they are a product of their own, and the joint one
    quantizes its input itself.
    """

    def __init__(self, net: DeltaNet, config: DeltaConfig, dtype: torch.dtype, *, exact: bool) -> None:
        groups = first, *second = delta_groups(net, exact=exact)
        self.joint = _joined(first, dtype, exact=exact)
        self._gates = _joined(second[0], dtype, exact=exact) if second else None
        self.out = Product([cast("Linear", net.out_proj)], dtype, exact=exact)
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
        """The mixer's products, in the order in which a pass computes them."""
        return [self.joint, *([] if self._gates is None else [self._gates]), self.out]

    @property
    def input_scale(self) -> Tensor | None:
        """The scale with which the norm before quantizes, if it does."""
        return self.joint.input_scale if self._gates is None else None

    def room(self, rows: int) -> Tensor | None:
        """See `Product.room`."""
        return self.joint.room(rows) if self._gates is None else None

    def __call__(self, index: int, normed: Tensor, out: Pass, shared: Shared) -> Tensor:
        """normed [R, E] -> what the gated delta net `index` adds [R, E]."""
        heads, states, rows = self._heads, shared.states, out.state_rows(index)
        assert states is not None
        product = self.joint(normed)
        gates = product[:, -2 * heads.values :] if self._gates is None else self._gates(normed)
        q = states.inputs(index, product, gates, heads, rows)
        mixed = states.outputs(index, q, rows.delta).flatten(0, 1)
        scale, room = self.out.input_scale, self.out.room(len(normed))
        added: Tensor = self.out(gated_norm(mixed, product, self._norm, self._eps, heads, scale=scale, out=room))
        return added


def mixer_groups(layer: Layer | DeltaLayer, *, exact: bool) -> tuple[tuple[nn.Module, ...], ...]:
    """The linear layers of what mixes tokens, those side by side that are one product."""
    if isinstance(layer, DeltaLayer):
        return (*delta_groups(layer.linear_attn, exact=exact), (layer.linear_attn.out_proj,))
    attention = layer.self_attn
    return (attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,)


def delta_groups(net: DeltaNet, *, exact: bool) -> tuple[tuple[nn.Module, ...], ...]:
    """The input projections of a gated delta net as one product, or as two where they cannot be one."""
    large, small = net.projections
    return ((*large, *small),) if unjoinable((*large, *small), exact=exact) is None else (large, small)


def unjoinable(group: Sequence[nn.Module], *, exact: bool, context: bool = False) -> str | None:
    """Reason that layers of one input are not one product. `context`: it is to make that of a drafter's context too."""
    kinds = {type(part) for part in group}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    if kind in (nn.Linear, Fp8Linear):
        return None
    if kind is None or not issubclass(kind, ComputedLinear):
        return f"layers of {', '.join(sorted(kind.__name__ for kind in kinds))} side by side"
    reason = kind.unjoinable(group, exact=exact)
    return reason or (f"{kind.__name__} has no product for a drafter's context" if context else None)


def _joined(parts: Sequence[nn.Module], dtype: torch.dtype, *, exact: bool) -> Product:
    """One product of linear layers, whose weights become views: held once, also by a model that keeps its layers."""
    product = Product(cast("Sequence[Linear]", parts), dtype, exact=exact)
    sizes = [cast("Linear", part).weight.shape[0] for part in parts]
    for part, weight in zip(parts, torch.split(product.weight, sizes), strict=True):
        cast("Linear", part).weight.data = weight
    return product


def _weight(norm: nn.Module) -> Tensor | None:
    return norm.weight.detach() if isinstance(norm, RMSNorm) else None


def _scale(cache: nn.Module) -> Tensor | None:
    """[1], of FP8 pages."""
    return cache.scale.view(1) if isinstance(cache, Fp8Cache) else None
