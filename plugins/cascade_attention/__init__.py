"""Cascade attention: new rows of a request attend to its paged context, and to each other through a mask.

reference.py     the specification in plain PyTorch, and the CPU path
cpu.py           the compiled library's attention by itself
triton/          the fused kernel, its launcher and its tile sizes; exact*.py and key_order.py are those of `exact`
tensorrt/        the kernel as a TensorRT plugin
onnx.py          the op as ONNX functions, for exported graphs
arguments.py     `PagedContext`, and `ChunkMask` for prompts in place of the `AttnMask` of mask.py
"""

from __future__ import annotations

from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import OP, ChunkMask, PagedContext, counters
from d2sd.plugins.cascade_attention.mask import AttnMask, pack_mask_bits
from d2sd.plugins.cascade_attention.reference import cascade_attention
from d2sd.plugins.dispatch import REFERENCE, pick

__all__ = ["AttnMask", "ChunkMask", "PagedContext", "cascade_attention", "chunk_kernel", "counters", "pack_mask_bits"]


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
    if pick(OP, k_pages, pages=True) is REFERENCE:
        return None
    from d2sd.plugins.cascade_attention.triton.launch import chunk_variant

    return chunk_variant(k_pages, requests, rows, columns, heads, itemsize, window)
