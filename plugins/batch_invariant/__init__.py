"""Batch-invariant ops: a row's result is the same bits whatever else is computed, for `exact: true` on CUDA.

    reference.py           the specification of a product; attention's is `cascade_attention`'s
    triton/linear.py       products of one tile shape a type, summed from the first input to the last
    triton/attention.py    keys in tiles by position: a key has the same place in a page, a tree and a prompt chunk
    triton/key_order.py    the keys of every row by position, from the mask
    triton/launch.py       tiles and launchers

The kernels of norms, rotation, the gate, quantisation and the choice of tokens have a program a row, or none of sums.
docs/accuracy.md says what the whole step promises, and what that costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.batch_invariant.reference import key_order_reference, linear_reference
from d2sd.plugins.cascade_attention.context import PagedContext
from d2sd.plugins.cascade_attention.reference import cascade_attention_reference
from d2sd.plugins.dispatch import Implementation

__all__ = ["attention", "key_order", "linear"]

OP = "batch-invariant ops"

# Shape letters: B requests, T rows, R rows of all requests, Hq/Hkv query and K/V heads, D head size.


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """x Wᵀ + bias: x [..., in], W [out, in] of its type, bias [out] of the result's -> [..., out].

    Sums are fp32, in one order over the inputs. bf16, fp16, fp32 (IEEE products, no TF32) and FP8.

    Args:
        scales: 0-dim fp32, of x and of W, FP8 only: their product scales the sums.
        dtype: of the result; by default x's.
    """
    dtype = dtype or x.dtype
    if dispatch.pick(OP, x, loaded=True) is Implementation.REFERENCE:
        return linear_reference(x, weight, bias, scales, dtype)
    from d2sd.plugins.batch_invariant.triton.launch import linear_triton

    return linear_triton(x, weight, bias, scales, dtype)


def key_order(attn_mask: Tensor) -> Tensor:
    """For each row of attn_mask [B, T, T] the columns that it sees, in their order, and how many: [B, T, T + 1] int32.

    In a tree or a chunk the n-th of them is the key at position context_len + n. The other numbers are undefined.
    """
    if dispatch.pick(OP, attn_mask, loaded=True) is Implementation.REFERENCE:
        return key_order_reference(attn_mask)
    from d2sd.plugins.batch_invariant.triton.launch import key_order_triton

    return key_order_triton(attn_mask)


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: PagedContext, attn_mask: Tensor, order: Tensor | None
) -> Tensor:
    """`cascade_attention`; `order` is `key_order(attn_mask)`, or None where the mask is causal: a prompt's chunk."""
    if dispatch.pick(OP, q, loaded=True) is Implementation.REFERENCE:
        return cascade_attention_reference(q, k, v, context, attn_mask)
    from d2sd.plugins.batch_invariant.triton.launch import attention_triton

    return attention_triton(q, k, v, context, order)
