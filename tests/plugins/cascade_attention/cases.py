"""Kernels of cascade attention: every line of the table of tiles, and with `exact` its tiles in several splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from d2sd.plugins.cascade_attention import ChunkMask, PagedContext, pack_mask_bits
from d2sd.plugins.cascade_attention.triton import exact
from d2sd.plugins.cascade_attention.triton.exact_kernel import attention_kernel, merge_splits_kernel
from d2sd.plugins.cascade_attention.triton.kernel import cascade_attention_kernel, pack_mask_kernel
from d2sd.plugins.cascade_attention.triton.key_order import key_order_kernel
from d2sd.plugins.cascade_attention.triton.launch import launch
from d2sd.plugins.cascade_attention.triton.tiles import TileConfig, select_tile
from tests.plugins.cases import GROUP, KV_HEADS, PAGE, TYPES, Check, Kernel, some

#: Largest error, as a part of the largest value. Results are weighted means of values, so rounding the weights and
#: the result once each costs at most a rounding of the largest value each; fp32 is a matter of order only.
BUDGET = {
    torch.float32: 2e-6,
    torch.float16: 2 * 2**-11,
    torch.bfloat16: 2 * 2**-8,  # the interpreter cuts bits off where a GPU rounds: twice 2^-9
}


def context_of(stored: str, size: int, pages: int = 2) -> PagedContext:
    """A request's pages of this type."""
    pool, scales = some(stored, 3, PAGE, KV_HEADS, size), [some("fp32") for _ in "kv"] if stored == "fp8" else []
    return PagedContext(pool, pool, some("i64", 1, pages), some("i64", 1), *scales)


@dataclass(frozen=True)
class Attention:
    """A call of the attention kernel."""

    kind: str
    size: int
    rows: int
    splits: int = 1
    fp8: bool = False  # pages
    contexts: tuple[int, ...] = (150, 37, 0)  # of several tiles, of one, and none
    group: int = GROUP  # query heads of a K/V head
    quantized: bool = False  # to FP8
    chunks: bool = False  # of prompts, in place of a tree
    window: int | None = None
    sinks: bool = False

    @property
    def packed(self) -> int:
        """Rows of all query heads of a K/V head."""
        return self.rows * self.group

    def tile(self, capability: int) -> TileConfig:
        shape = self.packed, self.size, TYPES[self.kind].itemsize, capability
        return select_tile(*shape, fp8=self.fp8, bounded=self.window is not None, splits=self.splits)

    @property
    def name(self) -> str:
        """The name that `make kernels` prints."""
        more = " split" * (self.splits > 1) + " to fp8" * self.quantized + " chunks" * self.chunks
        more += " window" * (self.window is not None) + " sinks" * self.sinks
        return f"attention {self.kind}{'/fp8' * self.fp8} D={self.size} rows={self.packed}{more}"

    def __str__(self) -> str:
        more = f"-window{self.window}" * (self.window is not None) + "-sinks" * self.sinks
        return f"{self.kind}{'-fp8' * self.fp8}-D{self.size}-rows{self.packed}-splits{self.splits}{more}"

    def launch(self) -> None:
        """On the meta device, for one request."""
        q, new = (some(self.kind, 1, self.rows, heads, self.size) for heads in (KV_HEADS * self.group, KV_HEADS))
        first = None if self.window is None else some("i64", *(() if self.chunks else (1,)), self.rows)
        chunks, words = ChunkMask((self.rows,), some("i64", 2), first), some("i32", 1, self.rows, -(-self.rows // 32))
        context, scale = context_of("fp8" if self.fp8 else self.kind, self.size), some("fp32")
        launch(
            q,
            new,
            new,
            context,
            chunks if self.chunks else words,
            splits=self.splits,
            first=first,
            sinks=some(self.kind, KV_HEADS * self.group) if self.sinks else None,
            scale=scale if self.quantized else None,
        )


def compiled() -> Iterator[Attention]:
    """Every line of `select_tile` at its smallest and its largest tile; split where batches are small."""
    for kind, fp8 in (("bf16", False), ("bf16", True), ("fp16", False), ("fp32", False)):
        for size in (64, 96, 128, 256):
            yield Attention(kind, size, 64, fp8=fp8)
            yield Attention(kind, size, 1, 4, fp8)
            yield Attention(kind, size, 64, fp8=fp8, chunks=True)
    case = Attention("bf16", 512, 64)  # Gemma 4's layers without a window
    yield from (case, replace(case, rows=1, splits=4), replace(case, chunks=True))
    for fp8 in (False, True):  # of trees, small batches
        for quantized in (False, True):
            yield Attention("bf16", 128, 64, 4, fp8, quantized=quantized)
    yield Attention("bf16", 128, 1, 16, quantized=True)
    yield Attention("bf16", 128, 16, 16)  # a draft of one request: the merge of the most rows and splits
    # gpt-oss has heads of 64, windows and sinks, Gemma 3 heads of 256 and windows, drafters of Qwen3 heads of 128
    for size, sinks in ((64, True), (128, False), (256, False)):
        for fp8 in (False, True):
            case = Attention("bf16", size, 64, fp8=fp8, window=128, sinks=sinks)
            yield from (case, replace(case, rows=1, splits=4), replace(case, chunks=True))
    yield Attention("bf16", 64, 64, sinks=True)


def executed() -> Iterator[Attention]:
    """Every line of `select_tile` at each of its tile heights, with and without splits, at head sizes 16 to 512.

    The kernels of bf16 and fp16 differ in the type of their products and in conversions: one of them takes the splits
    of one line, the other those of the next.
    """
    for fp8 in (False, True):
        for size in (16, 32, 64, 96, 128, 256):
            for rows in (1, 8, 16, 20):
                for turn, kind in enumerate(("bf16", "fp16")):
                    split = (rows == 8) == bool(turn)
                    yield Attention(kind, size, rows, 4 if split else 1, fp8)
            for splits in (1, 4):
                yield Attention("fp32", size, 3, splits, fp8)
    yield Attention("bf16", 512, 1, contexts=(70, 5))
    yield Attention("fp16", 512, 8, 4, contexts=(70, 5))
    for size in (64, 128, 256):  # the merge of many splits
        yield Attention("bf16", size, 1, 16, contexts=(700,))
    yield Attention("bf16", 64, 40)  # several row tiles and two mask words
    for turn, window in enumerate((1, 7, 33, 100, 400)):  # a token, part of a page, two tiles, several, all keys
        for fp8 in (False, True):
            for place, (size, rows) in enumerate(((64, 16), (128, 1), (256, 8))):
                kind = ("bf16", "fp16", "fp32")[(turn + place) % 3]
                yield Attention(kind, size, rows, 1 + 3 * (turn % 2), fp8, window=window, sinks=place != 1)


def attention_touched(values: dict[str, Any], context: int) -> tuple[dict[str, int], int]:
    """Pages of the context only, and what the page table says of them."""
    (batch, rows, heads, size), pages = values["q"].shape, values["k_pages"]
    committed = batch * context * pages.shape[-2] * size * pages.element_size()
    table = batch * -(-context // pages.shape[-3]) * values["page_table"].element_size()
    flops = 4 * batch * rows * heads * size * (context + rows)
    tiles = batch * values["HKV"] * -(-rows * values["GROUP"] // values["BLOCK_M"])
    return {"k_pages": committed, "v_pages": committed, "page_table": table, "arrived": 4 * tiles}, flops


def attend_exactly(kind: str, stored: str, size: int, *, tree: bool, window: bool = False) -> None:
    """Rows of trees, or of a prompt's chunk; with a `window` there are sinks too."""
    q, new = (some(kind, 1, 64, heads, size) for heads in (KV_HEADS * GROUP, KV_HEADS))
    order = some("i32", 1, 64, 65) if tree else None
    behind = (some("i64", 1, 64), some(kind, KV_HEADS * GROUP)) if window else ()
    exact.attend(q, new, new, context_of(stored, size, pages=512), order, *behind)


STORED = (("bf16", "bf16"), ("bf16", "fp8"), ("fp16", "fp16"), ("fp32", "fp32"))
EXACT = {
    f"exact attention {kind}{'/fp8' * (stored == 'fp8')} D={size}{' tree' * tree}": partial(
        attend_exactly, kind, stored, size, tree=tree
    )
    for kind, stored in STORED
    for size, tree in ((64, True), (96, True), (128, True), (256, True), (128, False))
} | {
    f"exact attention bf16{'/fp8' * (stored == 'fp8')} D={size}{' tree' * tree} window": partial(
        attend_exactly, "bf16", stored, size, tree=tree, window=True
    )
    for stored in ("bf16", "fp8")
    for size, tree in ((64, True), (64, False), (128, True), (256, True))
}
KERNELS = (
    Kernel(
        cascade_attention_kernel,
        ("out", "partial", "lse", "arrived"),
        {case.name: case.launch for case in compiled()},
        reads_back=("partial", "lse", "arrived"),
        touched=attention_touched,
        streamed=("k_pages", "v_pages"),
    ),
    Kernel(pack_mask_kernel, ("words",), {"pack mask": lambda: pack_mask_bits.triton(some("u1", 1, 64, 64))}),
    Kernel(attention_kernel, ("out", "lse"), EXACT, streamed=("k_pages", "v_pages")),
    Kernel(
        merge_splits_kernel, ("out",), {"exact merge D=128": partial(attend_exactly, "bf16", "bf16", 128, tree=True)}
    ),
    Kernel(
        key_order_kernel,
        ("order",),
        {f"key order {columns}": partial(exact.key_order, some("u1", 2, 64, columns)) for columns in (64, 1024)},
    ),
)
CHECKS = {"mask": Check("pack_mask", "layers.test_masks_pack", (33,), barriers=False)}
