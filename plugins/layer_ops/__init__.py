"""The ops of a transformer layer but attention, a kernel each, for inference on CUDA.

    reference.py     the specification in plain PyTorch, in `modeling/layers.py`'s order of rounding
    triton/          the kernels and their launchers

    op               takes the place of                                         products around it
    add_rms_norm     the residual addition, RMSNorm, quantisation               o or down  ->  qkv or gate-up
    qk_norm_rope     norms and rotation of q and k, biases, FP8 K/V             qkv        ->  attention
    silu_mul         silu(gate) * up, quantisation                              gate-up    ->  down
    embed_norm_rope  embeddings, the first norm, cosines and sines of a pass      ->  the first qkv
    rope_tables      cosines and sines of a pass whose rows are not tokens
    quantize         the input of an FP8 product that no other op makes
    linear           a product whose rows are the same bits in every batch, with `exact`; others are PyTorch's
    split_linear     a product of few rows, where it is faster than PyTorch's

Each op picks its implementation by device: CPU tensors take the reference, CUDA tensors the kernel. Whether a model
may call them on CUDA is asked once, when it is loaded (`d2sd.plugins.dispatch.use_fused_layers`).
"""

from __future__ import annotations

from d2sd.plugins.layer_ops.reference import (
    SPLIT_STEP,
    add_rms_norm,
    embed_norm_rope,
    linear,
    qk_norm_rope,
    quantize,
    rope_tables,
    silu_mul,
    split_linear,
)
from d2sd.plugins.layer_ops.types import Behind, Front, Heads, PagedRows

__all__ = [
    "SPLIT_STEP",
    "Behind",
    "Front",
    "Heads",
    "PagedRows",
    "add_rms_norm",
    "embed_norm_rope",
    "linear",
    "qk_norm_rope",
    "quantize",
    "rope_tables",
    "silu_mul",
    "split_linear",
]

# Shape letters: R rows of all requests, C rows of context before them, V vocabulary, E hidden, I intermediate, L
# layers, Hq/Hkv query and K/V heads, D head size.
