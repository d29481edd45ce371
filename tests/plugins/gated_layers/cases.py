"""Kernels of gated attention and of gated delta nets: Qwen3.5-4B's sizes, and Qwen3-Next's order of columns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule import DeltaRows
from d2sd.plugins.gated_layers import DeltaHeads
from d2sd.plugins.gated_layers.triton import kernel
from d2sd.plugins.layer_ops import Heads
from tests.plugins.cases import Check, Kernel, implementations, some

ops = implementations("gated_layers", "triton")

KEYS, VALUES, SIZE, TAPS = 16, 32, 128, 4
CHANNELS = (2 * KEYS + VALUES) * SIZE
WIDTH = CHANNELS + VALUES * SIZE + 2 * VALUES
#: So many that addresses of products take 64 bits.
ROWS = 1 << 22


def heads(kind: str, *, grouped: bool, sums: bool) -> DeltaHeads:
    scales = some("fp32", 4) if sums else None
    weights = some(kind, CHANNELS, TAPS), some("fp32", VALUES), some(kind, VALUES)
    return DeltaHeads(KEYS, VALUES, SIZE, SIZE, *weights, grouped, scales)


def inputs(kind: str, *, grouped: bool = False, sums: bool = False, chunks: bool = False, nodes: int = 64) -> None:
    shape = (1, nodes) if chunks else (ROWS // nodes, nodes)
    product = some("fp32" if sums else kind, ROWS, WIDTH)
    mask: AttnMask | ChunkMask = AttnMask(some("u1", *shape, nodes), packed=some("i32", *shape, -(-nodes // 32)))
    if chunks:
        mask = ChunkMask((nodes - 1, 1), some("i64", 3))
    slots = some("i64", 2 if chunks else shape[0])
    rows = DeltaRows(
        some(kind, *shape, KEYS, SIZE),
        some(kind, *shape, VALUES, SIZE),
        some("fp32", *shape, VALUES),
        some(kind, *shape, VALUES),
    )
    of, states = heads(kind, grouped=grouped, sums=sums), some(kind, 9, CHANNELS, TAPS - 1)
    ops.delta_inputs(product, product[:, -64:], of, states, slots, mask, some(kind, *shape, CHANNELS), rows)


def inputs_touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """The columns of the convolution and of the gates, and the state of each request."""
    made, states = values["inputs"], values["states"]
    rows, size = made.numel() // made.shape[-1], values["product"].element_size()
    columns = {"product": rows * made.shape[-1] * size, "gates": 2 * rows * values["HV"] * size}
    return columns | {"states": len(values["slots"]) * states[0].numel() * states.element_size()}, 0


def norm(kind: str, *, grouped: bool = False, fp8: bool = False) -> None:
    x, product = some(kind, ROWS, VALUES, SIZE), some("fp32" if fp8 else kind, ROWS, WIDTH)
    scale = some("fp32") if fp8 else None
    ops.gated_norm(x, product, some(kind, SIZE), 1e-6, heads(kind, grouped=grouped, sums=fp8), scale=scale)


def gate(kind: str, *, fp8: bool = False) -> None:
    """With a bias in FP8."""
    x, columns = some(kind, ROWS, 16, 256), (2 * 16 + 2 * 4) * 256
    of = Heads(16, 4, 256, 1e-6, gated=True)
    if fp8:
        of = replace(of, bias=some(kind, 1, columns), scales=some("fp32", 1, 3))
    ops.gate_heads(x, some("fp32" if fp8 else kind, ROWS, columns), of, scale=some("fp32") if fp8 else None)


def gate_touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """A gate for each number."""
    return {"product": values["x"].numel() * values["product"].element_size()}, 0


BF16 = torch.bfloat16
KERNELS = (
    Kernel(
        kernel.delta_inputs_kernel,
        ("q", "k", "v", "g", "beta", "inputs"),
        {f"delta inputs {kind}": partial(inputs, kind) for kind in ("bf16", "fp16", "fp32")}
        | {
            "delta inputs bf16 grouped": partial(inputs, "bf16", grouped=True),
            "delta inputs bf16 of 256 nodes": partial(inputs, "bf16", nodes=256),
            "delta inputs bf16/fp8 sums": partial(inputs, "bf16", sums=True),
            "delta inputs bf16 of chunks": partial(inputs, "bf16", chunks=True),
        },
        touched=inputs_touched,
    ),
    Kernel(
        kernel.gated_norm_kernel,
        ("out",),
        {f"gated norm {kind}": partial(norm, kind) for kind in ("bf16", "fp16", "fp32")}
        | {
            "gated norm bf16 grouped": partial(norm, "bf16", grouped=True),
            "gated norm bf16/fp8": partial(norm, "bf16", fp8=True),
        },
        touched=gate_touched,
    ),
    Kernel(
        kernel.gate_heads_kernel,
        ("out",),
        {f"gated heads {kind}": partial(gate, kind) for kind in ("bf16", "fp16", "fp32")}
        | {"gated heads bf16/fp8": partial(gate, "bf16", fp8=True)},
        touched=gate_touched,
    ),
)
CHECKS = {
    "gated heads": Check(
        "qk_norm_rope gate_heads", "gated_layers.test_heads", (True, True, "ROTARY", BF16), barriers=False
    ),
    "delta inputs": Check("delta_inputs", "gated_layers.test_delta_inputs", (37, True, True, BF16), barriers=False),
    "delta inputs of chunks": Check(
        "delta_inputs", "gated_layers.test_delta_inputs", (None, False, False, BF16), barriers=False
    ),
    "gated norm": Check("gated_norm", "gated_layers.test_gated_norm", (True, True, BF16), barriers=False),
    "quantized gates": Check("gate_heads gated_norm", "gated_layers.test_quantized_results", barriers=False),
}
