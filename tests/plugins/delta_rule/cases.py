"""Kernels of the gated delta rule: Qwen3.5-4B's heads, 64 nodes and several tiles, and heads of other sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

from d2sd.plugins import delta_rule as ops
from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule.triton.closed_form import chunk_rule_kernel, tree_rule_kernel
from d2sd.plugins.delta_rule.triton.convolution import convolution_kernel, keep_inputs_kernel
from d2sd.plugins.delta_rule.triton.recurrence import recurrence_kernel
from d2sd.plugins.delta_rule.types import DeltaRows
from tests.plugins.cases import TYPES, Check, Kernel, some

KEY_HEADS, HEADS, CHANNELS, LAYERS, SLOTS, BATCH = 16, 32, 8192, 24, 1 << 12, 2


class Mask(AttnMask):
    """Words and order without the kernels that make them."""

    words = property(lambda self: some("i32", *self.allowed.shape[:2], -(-self.allowed.shape[2] // 32)))
    order = property(lambda self: some("i32", *self.allowed.shape[:2], self.allowed.shape[2] + 2))


def rows_of(kind: str, size: int, *shape: int) -> DeltaRows:
    gates = some("fp32", *shape, HEADS)
    return DeltaRows(some(kind, *shape, KEY_HEADS, size), some(kind, *shape, HEADS, size), gates, gates)


def tree(kind: str, size: int, nodes: int, exact: bool = False) -> None:
    """Launch a tree of each request."""
    given = (
        some(kind, BATCH, nodes, KEY_HEADS, size),
        rows_of(kind, size, BATCH, nodes),
        some("fp32", SLOTS, HEADS, size, size),
    )
    ops.tree_delta_rule.triton(*given, some("i64", BATCH), Mask(some("u1", BATCH, nodes, nodes)), exact=exact)


def chunk(kind: str, size: int, exact: bool = False) -> None:
    """Launch chunks of 256 rows and fewer."""
    given = some(kind, 1, 300, KEY_HEADS, size), rows_of(kind, size, 1, 300), some("fp32", SLOTS, HEADS, size, size)
    chunks = ChunkMask((256, 44), some("i64", BATCH + 1))
    ops.chunk_delta_rule.triton(*given, some("i64", BATCH), chunks, exact=exact)


def commit(kind: str, size: int) -> None:
    states, slots = some("fp32", LAYERS, SLOTS, HEADS, size, size), some("i64", BATCH)
    ops.commit_delta_rule.triton(rows_of(kind, size, LAYERS, BATCH, 64), states, slots, some("i64", BATCH, 16), slots)


def convolve(kind: str, *, chunks: bool) -> None:
    weight, states = some(kind, CHANNELS, 4), some(kind, SLOTS, CHANNELS, 3)
    mask: AttnMask | ChunkMask = ChunkMask((256, 44), some("i64", 3)) if chunks else Mask(some("u1", BATCH, 64, 64))
    x = some(kind, 1, 300, CHANNELS) if chunks else some(kind, BATCH, 64, CHANNELS)
    ops.convolution.triton(x, weight, states, some("i64", BATCH), mask)


def keep(kind: str) -> None:
    states, slots = some(kind, LAYERS, SLOTS, CHANNELS, 3), some("i64", BATCH)
    ops.commit_convolution.triton(some(kind, LAYERS, BATCH, 64, CHANNELS), states, slots, some("i64", BATCH, 16), slots)


def states_touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """The states of the slots, as if they were those of different requests."""
    layers = 1 if values.get("path") is None else values["states"].shape[0]
    states = values["states"]
    return {"states": layers * values["slots"].numel() * states.shape[-3:].numel() * 4}, 0


def inputs_touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    states = values["states"]
    layers = states.shape[0] if states.dim() == 4 else 1
    touched = {"states": layers * values["slots"].numel() * values["CHANNELS"] * 3 * states.element_size()}
    if states.dim() == 4:  # at most three rows of a path
        touched["x"] = touched["states"]
    return touched, 0


TREES = {
    f"tree rule {kind} D={size} T={nodes}": partial(tree, kind, size, nodes)
    for kind, size, nodes in (
        ("bf16", 128, 1), ("bf16", 128, 64), ("bf16", 128, 256), ("bf16", 256, 64), ("bf16", 64, 64), ("fp32", 128, 64),
        ("fp32", 128, 16), ("fp16", 128, 64),
    )
}  # fmt: skip
CHUNKS = {f"chunk rule {kind} D={size}": partial(chunk, kind, size) for kind, size in (("bf16", 128), ("fp32", 128))}
STEPS = {"exact tree rule bf16 D=128": partial(tree, "bf16", 128, 64, True)}
STEPS |= {"exact chunk rule bf16 D=128": partial(chunk, "bf16", 128, True)}
STEPS |= {f"commit rule {kind} D={size}": partial(commit, kind, size) for kind, size in (("bf16", 128), ("fp32", 256))}
CONVOLUTIONS = {
    f"convolution bf16{' of chunks' * chunks}": partial(convolve, "bf16", chunks=chunks) for chunks in (False, True)
}
KERNELS = (
    Kernel(tree_rule_kernel, ("out", "changes", "sums"), TREES, ("changes", "sums"), ("states",), states_touched),
    Kernel(chunk_rule_kernel, ("out", "states"), CHUNKS, ("states",), ("states",), states_touched),
    Kernel(recurrence_kernel, ("out", "states"), STEPS, ("states",), ("states",), states_touched),
    Kernel(convolution_kernel, ("out",), CONVOLUTIONS, touched=inputs_touched),
    Kernel(
        keep_inputs_kernel,
        ("states",),
        {"keep inputs bf16": partial(keep, "bf16")},
        ("states",),
        touched=inputs_touched,
    ),
)
BF16 = TYPES["bf16"]
CHECKS = {
    "tree rule": Check("tree_rule", "delta_rule.test_trees", (21, 32, 8, 0.5, BF16, False)),
    "tree rule of tiles": Check("tree_rule", "delta_rule.test_trees", (70, 16, 40, 0.8, BF16, False)),
    "exact tree rule": Check("recurrence key_order", "delta_rule.test_trees", (21, 32, 8, 0.5, BF16, True)),
    "chunk rule": Check("chunk_rule", "delta_rule.test_chunks", ((70, 1, 5), BF16, False)),
    "commit rule": Check("recurrence", "delta_rule.test_commits", (BF16,)),
    "convolution": Check("convolution keep_inputs", "delta_rule.test_convolution", (40, BF16, True), barriers=False),
}
