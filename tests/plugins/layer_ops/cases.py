"""Kernels of layers but attention: Qwen3-8B's sizes, the largest norm, heads of no power of two."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from d2sd.plugins.layer_ops import Behind, Front, Heads, PagedRows
from d2sd.plugins.layer_ops.triton import kernel
from d2sd.plugins.layer_ops.triton.linear import linear_kernel
from tests.plugins.cases import GROUP, KV_HEADS, PAGE, TYPES, Check, Kernel, implementations, some

ops = implementations("layer_ops", "triton")

#: Type, and whether the results, or the sums of products and the pages, are FP8.
KINDS = (("bf16", False), ("bf16", True), ("fp16", False), ("fp32", False))
#: So many that strides between layers take 64 bits.
ROWS = 1 << 22


def norm(kind: str, width: int, *, fp8: bool) -> None:
    x, weight = some(kind, 2, width), some(kind, width)
    ops.add_rms_norm(x, x, weight, 1e-6, total=some(kind, 2, width), scale=some("fp32") if fp8 else None)


def norm_of_slots(kind: str, *, fp8: bool) -> None:
    """Behind the anchor of each block."""
    x = some(kind, 64, 4096)
    ops.add_rms_norm(x, x, some(kind, 4096), 1e-6, scale=some("fp32") if fp8 else None, block=16)


def norm_touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """Rows that are left out are not read."""
    size = values["out"].numel() * values["x"].element_size()
    return {"x": size, "branch": size}, 0


def heads(kind: str, size: int, *, context: bool = False, fp8: bool = False) -> None:
    """Launch the heads of a layer, or keys and values of a drafter's context; in FP8 over FP8 pages, with a bias."""
    queries = 0 if context else KV_HEADS * GROUP
    columns = (queries + 2 * KV_HEADS) * size
    one, factors = some("fp32", 2), (some(kind, 2, columns), some("fp32", 2, 3))
    given = Heads(
        queries,
        KV_HEADS,
        size,
        1e-6,
        None if context else some(kind, size),
        some(kind, 2, size),
        *((*factors, one, one) if fp8 else ()),
    )
    table, kept = some(kind, ROWS, size // 2), some(kind, 2, ROWS, KV_HEADS, size)
    ops.qk_norm_rope(some("fp32" if fp8 else kind, 2, ROWS, columns), table, table, given, kept, kept)


def gated_heads(*, fp8: bool) -> None:
    """Qwen3.5-4B's: a quarter of each head rotates, and norms are of 1 + weight; in FP8 over FP8 pages."""
    size, columns, one = 256, (2 * 16 + 2 * 4) * 256, some("fp32", 1)
    norms = some("bf16", size), some("bf16", 1, size)
    scales = {"scales": some("fp32", 1, 3), "k_scale": one, "v_scale": one} if fp8 else {}
    given = Heads(16, 4, size, 1e-6, *norms, rotary=64, gated=True, norm_offset=True, **scales)
    table, kept = some("bf16", ROWS, 32), some("bf16", 1, ROWS, 4, size)
    ops.qk_norm_rope(some("fp32" if fp8 else "bf16", 1, ROWS, columns), table, table, given, kept, kept)


def injecting(kind: str, *, fp8: bool) -> None:
    """Heads of a layer of which the first rows are context: into pages so far that their addresses take 64 bits."""
    columns, scales = (GROUP + 2) * KV_HEADS * 128, (some("fp32", 1),) * 2 if fp8 else ()
    given = Heads(KV_HEADS * GROUP, KV_HEADS, 128, 1e-6, some(kind, 128), some(kind, 1, 128), None, None, *scales)
    table, kept, places = some(kind, 48, 64), some(kind, 1, 48, KV_HEADS, 128), some("i64", 2, 16)
    pages = some("fp8" if fp8 else kind, 1 << 18, PAGE, KV_HEADS, 128)
    paged = PagedRows(pages, pages, some("i64", 2, 130), places, some("u1", 2, 16))
    ops.qk_norm_rope(some(kind, 1, 48, columns), table, table, given, kept, kept, paged)


def heads_touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """Counts every row of context as kept: pages take those rows, k and v the others."""
    pages, k, rows = values["k_pages"], values["k"], values["paged"]
    if pages is None:
        return {}, 0
    numbers, row = rows * pages[0, 0].numel(), k[0, 0].numel() * k.element_size()
    paged, own = numbers * pages.element_size(), (k.shape[1] - rows) * row
    table = rows * values["page_table"].element_size()
    return {"k_pages": paged, "v_pages": paged, "k": own, "v": own, "page_table": table}, 0


def embedded(kind: str, *, fp8: bool, behind: bool = True, context: bool = True) -> None:
    """Tokens of a table so large that rows of it start behind 64 bits' addresses."""
    tokens = some("i64", 2, 16)
    positions = Behind(some("i64", 2), some("i64", 2, 16)) if behind else tokens
    front = Front(some(kind, 32, 4096), some(kind, 4096), some("i64", 2, 16)) if context else None
    table = some(kind, 1 << 20, 4096), some(kind, 4096)
    scale = some("fp32") if fp8 else None
    ops.embed_norm_rope(tokens, *table, 1e-6, positions, some("fp32", 64), 1.0, scale=scale, front=front)


def embedded_touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """Counts the rows of the table that are embedded."""
    x = values["x"]
    return {"table": x.numel() * x.element_size()}, 0


def gate(kind: str, *, fp8: bool) -> None:
    scales, scale = (some("fp32", 2), some("fp32")) if fp8 else (None, None)
    ops.silu_mul(some("fp32" if fp8 else kind, 2, 2 * 12288), TYPES[kind], scales=scales, scale=scale)


def linear(kind: str, *, outputs: int = 24576, sums: bool = False) -> None:
    """Gate and up, or as many `outputs`; FP8 products scaled, or as `sums`."""
    x, weight = some(kind, 3, 4096), some(kind, outputs, 4096)
    scales = (some("fp32"), some("fp32")) if kind == "fp8" and not sums else None
    made = "fp32" if sums else "bf16" if kind == "fp8" else kind
    ops.linear(x, weight, None, scales, TYPES[made])


def split_linear(outputs: int, inputs: int, kind: str = "fp8", *, sums: bool = False) -> None:
    """Products of few rows; FP8 scaled, or as `sums`."""
    scales = (some("fp32"), some("fp32")) if kind == "fp8" and not sums else None
    made = "fp32" if sums else "bf16" if kind == "fp8" else kind
    ops.split_linear(some(kind, 3, inputs), some(kind, outputs, inputs), scales, TYPES[made])


def multiplied(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """All of each argument, and a product."""
    return {}, 2 * values["x"].numel() * values["OUT"]


def named(name: str, size: str = "") -> dict[str, tuple[str, bool]]:
    return {f"{name} {kind}{'/fp8' * fp8}{size}": (kind, fp8) for kind, fp8 in KINDS}


NORMS = {name: partial(norm, kind, 4096, fp8=fp8) for name, (kind, fp8) in named("add+norm", " E=4096").items()}
HEADS = {name: partial(heads, kind, 128, fp8=fp8) for name, (kind, fp8) in named("qk+norm+rope", " D=128").items()}
HEADS |= {f"qk+norm+rope bf16 D={size}": partial(heads, "bf16", size) for size in (96, 256)}
HEADS |= {"qk+norm+rope bf16 D=128 context": partial(heads, "bf16", 128, context=True)}
HEADS |= {f"gated qk+norm+rope bf16{'/fp8' * fp8}": partial(gated_heads, fp8=fp8) for fp8 in (False, True)}
PRODUCTS = {f"exact product {kind}": partial(linear, kind) for kind in ("bf16", "fp16", "fp32", "fp8")}
PRODUCTS |= {f"exact product {kind} of few": partial(linear, kind, outputs=4096) for kind in ("bf16", "fp16", "fp8")}
#: Qwen3-8B's gate and up, which is not split, and its shortest and longest shares of inputs.
SPLITS = {
    "split product fp8 of many": partial(split_linear, 24576, 4096),
    "split product fp8": partial(split_linear, 4096, 4096),
    "split product fp8 of long rows": partial(split_linear, 4096, 12288),
    "split product fp8 sums": partial(split_linear, 6144, 4096, sums=True),
    "split product bf16 of many": partial(split_linear, 24576, 4096, "bf16"),
    "split product bf16": partial(split_linear, 4096, 4096, "bf16"),
    "split product bf16 of long rows": partial(split_linear, 4096, 12288, "bf16"),
    "split product fp16": partial(split_linear, 4096, 4096, "fp16"),
}
KERNELS = (
    Kernel(
        linear_kernel,
        ("out", "partial", "arrived"),
        PRODUCTS | {"exact product fp8 sums": partial(linear, "fp8", sums=True)} | SPLITS,
        reads_back=("partial", "arrived"),
        streamed=("weight",),
        touched=multiplied,
    ),
    Kernel(
        kernel.add_rms_norm_kernel,
        ("total", "out"),
        NORMS
        | {"add+norm bf16 E=16384": partial(norm, "bf16", 16384, fp8=False)}
        | {f"add+norm bf16{'/fp8' * fp8} of slots": partial(norm_of_slots, "bf16", fp8=fp8) for fp8 in (False, True)},
        touched=norm_touched,
    ),
    Kernel(
        kernel.qk_norm_rope_kernel,
        ("q", "k", "v", "k_pages", "v_pages"),
        HEADS
        | {f"qk+norm+rope {kind}{'/fp8' * fp8} pages": partial(injecting, kind, fp8=fp8) for kind, fp8 in KINDS[:2]},
        touched=heads_touched,
    ),
    Kernel(
        kernel.silu_mul_kernel,
        ("out",),
        {name: partial(gate, kind, fp8=fp8) for name, (kind, fp8) in named("silu*up").items()},
    ),
    Kernel(
        kernel.rope_tables_kernel,
        ("cos", "sin"),
        {
            "rope tables": lambda: ops.rope_tables(some("i64", 2), some("fp32", 64), 1.0, TYPES["bf16"]),
            "rope tables behind others": lambda: ops.rope_tables(
                some("i64", 2), some("fp32", 64), 1.0, TYPES["bf16"], some("i64", 3)
            ),
        },
    ),
    Kernel(
        kernel.embed_norm_rope_kernel,
        ("x", "out", "cos", "sin"),
        {name: partial(embedded, kind, fp8=fp8) for name, (kind, fp8) in named("embed+norm+rope").items()}
        | {
            "embed+norm+rope bf16 of tokens alone": partial(embedded, "bf16", fp8=False, context=False),
            "embed+norm+rope bf16 at positions": partial(embedded, "bf16", fp8=False, behind=False, context=False),
        },
        touched=embedded_touched,
        streamed=("table",),
    ),
    Kernel(
        kernel.quantize_kernel,
        ("out",),
        {"quantize bf16 to fp8": lambda: ops.quantize(some("bf16", 2, 4096), some("fp32"))},
    ),
)
CHECKS = {
    "norm": Check("add_rms_norm", "layers.test_norm", (1024, TYPES["bf16"])),
    "embedded": Check("embed_norm_rope add_rms_norm", "layers.test_embedded", (1024, True, True, TYPES["bf16"])),
    "heads": Check("qk_norm_rope", "layers.test_heads", (1, "HQ", True, True, TYPES["bf16"]), barriers=False),
    "broken values": Check(
        "qk_norm_rope",
        "layers.test_what_is_broken_in_a_value_moves_to_its_key",
        (1, "HQ", True, False, math.nan),
        barriers=False,
    ),
    "injecting heads": Check("qk_norm_rope", "layers.test_heads_of_context", (True, TYPES["bf16"]), barriers=False),
    "gate": Check("silu_mul", "layers.test_gate", (True, TYPES["bf16"])),
    "tables": Check("rope_tables", "layers.test_tables", (TYPES["bf16"],), barriers=False),
    "quantized": Check(
        "quantize silu_mul add_rms_norm embed_norm_rope", "layers.test_quantized_results", barriers=False
    ),
}
