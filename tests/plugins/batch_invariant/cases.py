"""Kernels of exact mode: every tile, in several splits; Qwen3-8B's gate and up."""

from __future__ import annotations

from functools import partial

from d2sd.plugins.batch_invariant.triton import launch as exact
from d2sd.plugins.batch_invariant.triton.attention import attention_kernel, merge_splits_kernel
from d2sd.plugins.batch_invariant.triton.key_order import key_order_kernel
from d2sd.plugins.batch_invariant.triton.linear import linear_kernel
from tests.plugins.cascade_attention.cases import context_of
from tests.plugins.cases import GROUP, KV_HEADS, TYPES, Kernel, some


def linear(kind: str, *, sums: bool = False) -> None:
    """FP8 products scaled, or as `sums`."""
    x, weight = some(kind, 3, 4096), some(kind, 24576, 4096)
    scales = (some("fp32"), some("fp32")) if kind == "fp8" and not sums else None
    made = "fp32" if sums else "bf16" if kind == "fp8" else kind
    exact.linear_triton(x, weight, None, scales, TYPES[made])


def attend(kind: str, stored: str, size: int, *, tree: bool) -> None:
    """Rows of trees, or of a prompt's chunk."""
    q, new = (some(kind, 1, 64, heads, size) for heads in (KV_HEADS * GROUP, KV_HEADS))
    order = some("i32", 1, 64, 65) if tree else None
    exact.attention_triton(q, new, new, context_of(stored, size, pages=512), order)


STORED = (("bf16", "bf16"), ("bf16", "fp8"), ("fp16", "fp16"), ("fp32", "fp32"))
ATTENTION = {
    f"exact attention {kind}{'/fp8' * (stored == 'fp8')} D={size}{' tree' * tree}": partial(
        attend, kind, stored, size, tree=tree
    )
    for kind, stored in STORED
    for size, tree in ((64, True), (96, True), (128, True), (256, True), (128, False))
}
PRODUCTS = {f"exact product {kind}": partial(linear, kind) for kind in ("bf16", "fp16", "fp32", "fp8")}
KERNELS = (
    Kernel(linear_kernel, ("out",), PRODUCTS | {"exact product fp8 sums": partial(linear, "fp8", sums=True)}),
    Kernel(attention_kernel, ("out", "lse"), ATTENTION),
    Kernel(merge_splits_kernel, ("out",), {"exact merge D=128": partial(attend, "bf16", "bf16", 128, tree=True)}),
    Kernel(
        key_order_kernel, ("order",),
        {
            f"key order {columns}": partial(exact.key_order_triton, some("u1", 2, 64, columns))
            for columns in (64, 1024)
        },
    ),
)  # fmt: skip
