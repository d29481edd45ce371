"""Cascade attention: new rows of a request attend to its paged context, and to each other through a mask.

    reference.py     the specification in plain PyTorch, and the CPU path
    compiled.py      the compiled library's attention by itself, on a CPU
    triton/          the fused kernel, its launcher and its tile sizes; exact*.py and key_order.py are those of `exact`
    tensorrt/        the kernel as a TensorRT plugin
    onnx.py          the op as ONNX functions, for exported graphs
    arguments.py     `PagedContext`, and `ChunkMask` for prompts in place of `AttnMask`

`cascade_attention` picks the implementation by the rules of `d2sd.plugins.dispatch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.cascade_attention import compiled
from d2sd.plugins.cascade_attention.arguments import ChunkMask, PagedContext, counters
from d2sd.plugins.cascade_attention.reference import cascade_attention_reference, chunks_reference, pack_mask_reference
from d2sd.plugins.dispatch import Implementation
from d2sd.plugins.shared.fp8 import to_pages

__all__ = ["AttnMask", "ChunkMask", "PagedContext", "cascade_attention", "chunk_kernel", "counters", "pack_mask_bits"]

OP = "attention"


def cascade_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PagedContext,
    attn_mask: Tensor | AttnMask | ChunkMask,
    *,
    sinks: Tensor | None = None,
    scale: Tensor | None = None,
    exact: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of T new rows over their request's paged context and, through a mask, over each other.

    Chunks of prompts (`ChunkMask`) have q, k and v [1, N, ...] over a context of B requests.

    Args:
        q: [B, T, Hq, D], rotated. Query head h reads K/V head h // (Hq / Hkv).
        k, v: [B, T, Hkv, D], the new rows' own keys (rotated) and values; they are not in the pages yet. For FP8 pages
            they are in q's dtype too, but already rounded to what such pages can hold.
        context: committed K/V of this layer.
        attn_mask: [B, T, T] bool, row t may attend to row u. Layers that share a mask pass one `AttnMask` of it, which
            is packed for the kernel once.
        sinks: [Hq], a logit for each query head that takes part in its softmax and has no value.
        scale: 0-dim fp32; with it the result is quantized, fp8(out / scale).
        exact: batch-invariant: a row's result is the same bits whatever else is computed, and wherever in pages, a
            tree or a chunk its keys are. On CUDA the model was fused, so that the device is known to run it; on a CPU
            it needs the compiled library, heads that it takes and pages of q's type, and is not had otherwise.
        out: [B, T, Hq, D], contiguous, of the result's type; receives the result unless `exact`. None: a new tensor.

    Returns:
        [B, T, Hq, D] in q's dtype or FP8 (E4M3); scores are scaled by D^-0.5.

    Raises:
        D2SDError: the tensors are on a CUDA device whose kernel does not take them, under `D2SD_NO_FALLBACK=1`.
    """
    mask = AttnMask(attn_mask) if isinstance(attn_mask, Tensor) else attn_mask
    if dispatch.pick(OP, context.k_pages, pages=True, loaded=exact) is Implementation.REFERENCE:
        if exact and compiled.takes(q, context):
            allowed = mask if isinstance(mask, ChunkMask) else mask.allowed
            heads = compiled.attention_compiled(q, k, v, context, allowed, mask.first, sinks)
        elif isinstance(mask, ChunkMask):
            heads = chunks_reference(q, k, v, context, mask, sinks)
        else:
            heads = cascade_attention_reference(q, k, v, context, mask.allowed, mask.first, sinks)
        result = heads if scale is None else to_pages(heads, scale)
        return result if out is None else out.copy_(result)
    if exact:
        from d2sd.plugins.cascade_attention.triton.exact import exact_attention_triton

        kernel_mask = mask if isinstance(mask, ChunkMask) else mask.order
        return exact_attention_triton(q, k, v, context, kernel_mask, first=mask.first, sinks=sinks, scale=scale)
    from d2sd.plugins.cascade_attention.triton.launch import cascade_attention_triton

    kernel_mask = mask if isinstance(mask, ChunkMask) else mask.words
    return cascade_attention_triton(
        q,
        k,
        v,
        context,
        kernel_mask,
        first=mask.first,
        window=mask.window,
        sinks=sinks,
        scale=scale,
        out=out,
        arrived=lambda: mask.arrived,
    )


def chunk_kernel(
    k_pages: Tensor, requests: int, rows: int, columns: int, heads: int, itemsize: int, window: int | None
) -> object:
    """A value for the kernel that a pass over prompts' chunks runs: passes with equal ones compile nothing new.

    Args:
        k_pages: [..., P, Z, Hkv, D], of any layer.
        requests, rows, columns: B; rows of the longest chunk; columns M of the page table.
        heads, itemsize: Hq; bytes of a number of the queries.
        window: most tokens that a row of the layer sees; None: all.
    """
    if dispatch.pick(OP, k_pages, pages=True) is Implementation.REFERENCE:
        return None
    from d2sd.plugins.cascade_attention.triton.launch import chunk_variant

    return chunk_variant(k_pages, requests, rows, columns, heads, itemsize, window)


@dataclass(frozen=True)
class AttnMask:
    """The mask of one pass, shared by its layers, which run in order: packed once, and only if a kernel runs."""

    allowed: Tensor  # [B, T, T] bool, row t may attend to row u. Every row, padding too, must attend to itself
    #: [B, T] int64, the first position of the context that each row sees; None: 0. At most the context's length plus
    #: the row's depth: of new rows `allowed` alone says which it sees.
    first: Tensor | None = None
    window: int | None = None  # most positions of the context that a row sees; None: all
    counters: Tensor | None = None  # `arrived` of a pool, which its passes share
    packed: Tensor | None = None  # `words`, where they are known: they may be broadcast over the requests

    @cached_property
    def words(self) -> Tensor:
        """[B, T, ceil(T/32)] int32."""
        return pack_mask_bits(self.allowed) if self.packed is None else self.packed.contiguous()

    @cached_property
    def order(self) -> Tensor:
        """[B, T, T + 2] int32 for the kernel of `exact`: the columns that each row sees, in their order, at T how many,
        and at T + 1 its leader: the last row that sees these first.

        In a tree the n-th of them is the key at position context_len + n. The other numbers are undefined.
        """
        from d2sd.plugins.cascade_attention.triton.exact import key_order_triton

        return key_order_triton(self.allowed)

    @cached_property
    def arrived(self) -> Tensor:
        """Zeroed split counters, shared by the layers of a pass."""
        return counters(self.allowed.device) if self.counters is None else self.counters


def pack_mask_bits(attn_mask: Tensor) -> Tensor:
    """[B, T, T] bool -> [B, T, ceil(T/32)] int32; on CUDA in one kernel."""
    if dispatch.pick(OP, attn_mask, loaded=True) is Implementation.TRITON:
        from d2sd.plugins.cascade_attention.triton.launch import pack_mask_triton

        return pack_mask_triton(attn_mask)
    return pack_mask_reference(attn_mask)
