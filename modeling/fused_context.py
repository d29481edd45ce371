"""A drafter's context on CUDA: keys and values of all layers, by the weights of the layers' qkv products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.product import Product, sums
from d2sd.modeling.quantized import joined
from d2sd.plugins.layer_ops import Heads, qk_norm_rope

# Shape letters: R rows, E hidden, L layers, Hkv K/V heads, D head size.


class ContextProduct:
    """The product that makes keys and values of a context, over the same weights as the layers' qkv products."""

    def __init__(self, layers: Sequence[tuple[Product, Heads]], body: BodyConfig) -> None:
        products, heads = zip(*layers, strict=True)
        stacked = joined([product.weight for product in products]).view(len(layers), -1, body.hidden_size)
        for product, weight in zip(products, stacked, strict=True):
            product.weight = weight
        queries = heads[0].parts[0]
        self._weight = stacked[:, queries:]  # [L, 2·Hkv·D, E]
        self.input_scale: Tensor | None = None
        scales = None
        if products[0].input_scale is not None:
            self.input_scale = products[0].input_scale  # the same in all layers
            self._one = torch.ones_like(self.input_scale)
            scales = self.input_scale * torch.stack([cast("Tensor", product.weight_scales) for product in products])
        bias = None
        if products[0].bias is not None:
            bias = torch.stack([cast("Tensor", product.bias)[queries:] for product in products])
        k_norm = [head.k_norm for head in heads if head.k_norm is not None]
        first = heads[0]
        self._heads = Heads(
            0,
            body.num_kv_heads,
            body.head_dim,
            body.rms_norm_eps,
            k_norm=torch.cat(k_norm) if k_norm else None,
            bias=bias,
            scales=scales,
            k_scale=None if first.k_scale is None else torch.cat([cast("Tensor", head.k_scale) for head in heads]),
            v_scale=None if first.v_scale is None else torch.cat([cast("Tensor", head.v_scale) for head in heads]),
        )

    def __call__(self, context: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """context [R, E] -> k, v [L, R, Hkv, D]."""
        layers, rows, heads = len(self._weight), len(context), self._heads
        if self.input_scale is None:
            product = torch.bmm(context.expand(layers, -1, -1), self._weight.transpose(1, 2))
        else:
            product = torch.empty(layers, rows, self._weight.shape[1], device=context.device)
            for weight, out in zip(self._weight, product, strict=True):
                sums(context, weight, self._one, out)
        k, v = torch.empty(2, layers, rows, heads.kv, heads.size, dtype=cos.dtype, device=context.device).unbind()
        qk_norm_rope(product, cos, sin, heads, k, v)
        return k, v
