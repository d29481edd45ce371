"""The exported part of each model: its body, between the embedding and the head, with one attention node per layer.

Embedding and head are not exported: the models share them, and each engine would hold a copy. K/V pools are
inputs, one per layer; K/V of the new rows are outputs, which the runtime commits to the pools. Layers that see alike
share a mask (`view_inputs`).

    target    embedded, positions, attn_mask, page_table, context_len, pages      -> hidden, features, k, v
    drafter   the same, and features, feature_positions, feature_len of context
              not yet written to the pages                                      -> hidden, k, v of that context
              one that reads the target's pages has no features                 -> hidden
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.fp8 import Fp8Cache, Fp8Linear
from d2sd.modeling.layers import Layer
from d2sd.plugins.cascade_attention.onnx import BEHIND, BLOCK, DOMAIN, INPUTS, TREE, attributes
from d2sd.runtime.backends.exported import view_inputs

# Shape letters: B requests, T rows, C new context rows, W words of the attention mask, M pages a request, P pages,
# Z tokens a page, E hidden, n auxiliary layers, L layers, Hkv heads, D head size.

#: Positions of rows, masks of views, first positions of views with a window; page table and length of context.
Rows = tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]
#: K pages of each layer, and V pages.
Pages = list[list[Tensor]]


class TargetBody(nn.Module):
    """For export only: its attention returns zeros."""

    def __init__(self, target: Decoder, aux_layer_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.norm, self._angles = target.layers, target.norm, target.angles
        self._config, self._aux_layer_ids = target.config.body, aux_layer_ids

    def forward(self, embedded: Tensor, rows: Rows, pages: Pages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """embedded [B, T, E] -> hidden [B, T, E], normalized; features [B, T, n·E]; k, v [L, B, T, Hkv, D]."""
        x, angles = embedded, self._angles(rows[0], embedded.dtype)
        keys, values, aux = [], [], {}
        attend = _Attention(self._config, rows, pages)
        for index, layer in enumerate(self.layers):
            x, (k, v) = layer(x, angles[index], index, attend)
            keys.append(k)
            values.append(v)
            if index in self._aux_layer_ids:
                aux[index] = x
        features = torch.cat([aux[i] for i in self._aux_layer_ids], dim=-1) if self._aux_layer_ids else x[..., :0]
        return self.norm(x), features, torch.stack(keys), torch.stack(values)


class DrafterBody(nn.Module):
    """For export only: its attention returns zeros."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self._drafter = drafter

    def forward(self, embedded: Tensor, rows: Rows, new: list[Tensor], pages: Pages) -> tuple[Tensor, Tensor, Tensor]:
        """embedded [B, T, E] and features [B, C, n·E] -> hidden [B, T, E]; k, v [L, B, C, Hkv, D] of the features.

        `new`: features of context, their positions, and how many there are.
        """
        features, feature_positions, feature_len = new
        new_k, new_v = self._drafter.context_keys_values(features, feature_positions)
        attend = _Attention(self._drafter.config.body, rows, pages, (new_k, new_v, feature_len))
        return self._drafter(embedded, rows[0], attend), new_k, new_v


class FlexBody(nn.Module):
    """For export only: its attention returns zeros. A graph shares no weights, so it has a copy of the target's MLPs
    and norms.
    """

    def __init__(self, head: FlexHead) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_FlexLayer(cast("Layer", layer)) for layer in head.layers)
        self.norm, self._rotary, self._config = head.norm, head.rotary, head.config.body

    def forward(self, embedded: Tensor, rows: Rows, pages: Pages) -> Tensor:
        """embedded [B, T, E], of `FlexHead.blocks` -> hidden [B, T, E], normalized."""
        x, cos_sin = embedded, self._rotary(rows[0], embedded.dtype)
        attend = _Attention(self._config, rows, pages)
        for index, layer in enumerate(self.layers):
            x, _ = layer(x, cos_sin, index, attend)
        out: Tensor = self.norm(x)
        return out


class _FlexLayer(Layer):
    """A `DraftLayer` that registers the modules it shares with the target."""

    def __init__(self, layer: Layer) -> None:
        nn.Module.__init__(self)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm


class _Attention:
    """The node of each layer."""

    def __init__(
        self, body: BodyConfig, rows: Rows, pages: Pages, new: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> None:
        """`new`: K/V of new context rows [L, B, C, Hkv, D], and how many."""
        positions, masks, firsts, of_context = rows
        views = view_inputs(body)
        self._masks = dict(zip((view.mask for view in views), masks, strict=True))
        self._firsts = dict(zip((view.first for view in views if view.first), firsts, strict=True))
        self._views = [next(view for view in views if view.of == seen) for seen in body.views]
        self._positions, self._pages, self._of_context, self._new = positions, pages, of_context, new

    def __call__(self, index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        view, new = self._views[index], self._new
        name = TREE if new is None else BLOCK
        inputs = [q, k, v, *([] if new is None else [new[0][index], new[1][index], new[2]])]
        inputs += [*(pages[index] for pages in self._pages), *self._of_context, self._masks[view.mask]]
        if view.first is not None or sinks is not None:
            name = BEHIND[name]
            inputs.append(self._positions * 0 if view.first is None else self._firsts[view.first])
            inputs.append(torch.full((q.shape[2],), -torch.inf, dtype=q.dtype) if sinks is None else sinks)
        assert len(inputs) == len(INPUTS[name])
        return _node(name, inputs, q)


def _node(name: str, inputs: list[Tensor], like: Tensor) -> Tensor:
    out: Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{name}", inputs, {**attributes()}, dtype=like.dtype, shape=like.shape, version=1
    )
    return out


class _QuantizedLinear(nn.Module):
    """An `Fp8Linear` as QuantizeLinear and DequantizeLinear around a MatMul, which TensorRT fuses."""

    def __init__(self, layer: Fp8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._weight = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
        self._bias = layer.bias
        for name in ("weight_scale", "input_scale"):
            self.register_buffer(name, getattr(layer, name).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        weight = _dequantized(self._weight, self.get_buffer("weight_scale"), x.dtype)
        out = torch.matmul(_rounded(x, self.get_buffer("input_scale")), weight)
        return out if self._bias is None else out + self._bias


class _QuantizedCache(nn.Module):
    """An `Fp8Cache` as QuantizeLinear and DequantizeLinear."""

    def __init__(self, cache: Fp8Cache, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("scale", cache.scale.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return _rounded(x, self.get_buffer("scale"))


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    fp8 = torch.onnx.ops.symbolic("QuantizeLinear", [x, scale, _zero()], dtype=torch.float8_e4m3fn, shape=x.shape)
    return _dequantized(fp8, scale, x.dtype)


def _dequantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = torch.onnx.ops.symbolic("DequantizeLinear", [x, scale, _zero()], dtype=dtype, shape=x.shape)
    return out


def _zero() -> Tensor:
    """The zero point selects FP8: without one the output would be uint8."""
    return torch.zeros((), dtype=torch.float8_e4m3fn)


def lower_fp8_to_qdq(body: nn.Module, dtype: torch.dtype) -> None:
    """Replace every FP8 layer of a body, in place, by QuantizeLinear and DequantizeLinear."""
    replacements: dict[type[nn.Module], Any] = {Fp8Linear: _QuantizedLinear, Fp8Cache: _QuantizedCache}
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in replacements:
                setattr(parent, name, replacements[type(child)](child, dtype))
