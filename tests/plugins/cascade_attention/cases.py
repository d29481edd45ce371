"""Kernels of cascade attention: every line of the table of tiles, at its smallest and its largest tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from d2sd.plugins.cascade_attention import ChunkMask, PagedContext
from d2sd.plugins.cascade_attention.triton.kernel import cascade_attention_kernel, pack_mask_kernel
from d2sd.plugins.cascade_attention.triton.launch import launch, pack_mask_triton
from d2sd.plugins.cascade_attention.triton.tiles import select_tile
from tests.plugins.cases import GROUP, KV_HEADS, PAGE, TYPES, Check, Kernel, some


def context_of(stored: str, size: int, pages: int = 2) -> PagedContext:
    """A request's pages of this type."""
    pool, scales = some(stored, 3, PAGE, KV_HEADS, size), [some("fp32") for _ in "kv"] if stored == "fp8" else []
    return PagedContext(pool, pool, some("i64", 1, pages), some("i64", 1), *scales)


def attend(
    kind: str, stored: str, size: int, rows: int, splits: int, *, quantized: bool = False, chunks: bool = False
) -> None:
    """Queries of type `kind` over pages of type `stored`, of a tree or of `chunks` of prompts; `quantized`: to FP8."""
    q, new = (some(kind, 1, rows, heads, size) for heads in (KV_HEADS * GROUP, KV_HEADS))
    mask = ChunkMask((rows,), some("i64", 2)) if chunks else some("i32", 1, rows, -(-rows // 32))
    launch(q, new, new, context_of(stored, size), mask, splits=splits, scale=some("fp32") if quantized else None)


def attention_launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Split where batches are small."""

    def one(kind: str, stored: str, size: int, rows: int, splits: int, **more: bool) -> tuple[str, Callable[[], None]]:
        tile = select_tile(rows * GROUP, size, TYPES[kind].itemsize, fp8=stored == "fp8")
        said = " split" * (splits > 1) + " to fp8" * more.get("quantized", False) + " chunks" * ("chunks" in more)
        name = f"attention {kind}{'/fp8' * (stored == 'fp8')} D={size} tile={tile.rows}{said}"
        return name, partial(attend, kind, stored, size, rows, splits, **more)

    for kind, stored in (("bf16", "bf16"), ("bf16", "fp8"), ("fp16", "fp16"), ("fp32", "fp32")):
        for size in (64, 96, 128, 256):
            yield one(kind, stored, size, 64, 1)
            yield one(kind, stored, size, 1, 4)
            yield one(kind, stored, size, 64, 1, chunks=True)
    for stored in ("bf16", "fp8"):  # of trees, small batches
        for quantized in (False, True):
            yield one("bf16", stored, 128, 64, 4, quantized=quantized)
    yield one("bf16", "bf16", 128, 1, 16, quantized=True)


def attention_touched(values: dict[str, Any], context: int) -> tuple[dict[str, int], int]:
    """Pages of the context only, and what the page table says of them."""
    (batch, rows, heads, size), pages = values["q"].shape, values["k_pages"]
    committed = batch * context * pages.shape[-2] * size * pages.element_size()
    table = batch * -(-context // pages.shape[-3]) * values["page_table"].element_size()
    flops = 4 * batch * rows * heads * size * (context + rows)
    tiles = batch * values["HKV"] * -(-rows * values["GROUP"] // values["BLOCK_M"])
    return {"k_pages": committed, "v_pages": committed, "page_table": table, "arrived": 4 * tiles}, flops


KERNELS = (
    Kernel(
        cascade_attention_kernel, ("out", "partial", "lse", "arrived"), dict(attention_launches()),
        reads_back=("partial", "lse", "arrived"), touched=attention_touched,
    ),
    Kernel(pack_mask_kernel, ("words",), {"pack mask": lambda: pack_mask_triton(some("u1", 1, 64, 64))}),
)  # fmt: skip
CHECKS = {"mask": Check("pack_mask", "layers.test_masks_pack", (33,), barriers=False)}
