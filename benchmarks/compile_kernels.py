"""Compile the Triton kernels for every architecture, without a GPU, and check their resources. `make kernels` runs it.

    python -m benchmarks.compile_kernels [--only TEXT] [--capability N ...]

One line a kernel and architecture; minutes in all. Exits with 1 where a bound is broken. Nothing here ran on a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.ahead_of_time import CAPABILITIES, Compiled, compile_kernel
from d2sd.plugins.batch_invariant.triton import launch as invariant
from d2sd.plugins.batch_invariant.triton.attention import attention_kernel, merge_splits_kernel
from d2sd.plugins.batch_invariant.triton.key_order import key_order_kernel
from d2sd.plugins.batch_invariant.triton.linear import linear_kernel
from d2sd.plugins.cascade_attention.triton import launch as attention
from d2sd.plugins.cascade_attention.triton.kernel import cascade_attention_kernel, pack_mask_kernel
from d2sd.plugins.cascade_attention.triton.tiles import chunk_warps, select_tile
from d2sd.plugins.choice.triton import launch as choices
from d2sd.plugins.choice.triton.drafts import pool_kernel, segments_kernel
from d2sd.plugins.choice.triton.filters import threshold_kernel
from d2sd.plugins.choice.triton.tokens import combine_kernel, scores_kernel
from d2sd.plugins.handover.triton import launch as handover
from d2sd.plugins.handover.triton.kernel import begin_kernel, end_kernel
from d2sd.plugins.kv_pages.triton import launch as pages
from d2sd.plugins.kv_pages.triton.kernel import write_pages_kernel
from d2sd.plugins.layer_ops.triton import kernel as layer_kernels
from d2sd.plugins.layer_ops.triton import launch as layers
from d2sd.plugins.shared.sizes import power
from d2sd.plugins.trees.triton import launch as trees
from d2sd.plugins.trees.triton.accept import accept_kernel
from d2sd.plugins.trees.triton.branches import (
    blocks_kernel,
    boundaries_kernel,
    branches_kernel,
    mask_rejected_kernel,
)
from d2sd.plugins.trees.triton.growth import grow_kernel
from d2sd.plugins.trees.triton.nodes import candidates_kernel, chain_kernel

KV_HEADS, GROUP, PAGE = 8, 4, 16  # Qwen3-8B's and Llama-3.1-8B's; they change addresses, not tiles
FP8 = "fp8e4nv"
#: Default limit of shared memory per block in bytes, on every architecture.
MOST_SHARED = 48 * 1024
#: On sm_100 tiles of 64 rows take 32 bytes more, also those that fill the 48 KB. Triton's launcher requests
#: the needed size; any other launcher must do so there.
MOST_SHARED_100 = MOST_SHARED + 32
#: Bytes a thread, where ptxas uses at most `CHOSEN` of 255 registers: its choice, not a shortage. Else none.
MOST_SPILLED = 8
#: Of exact mode's product and attention.
MOST_SPILLED_EXACT = 24
CHOSEN = 168


@dataclass(frozen=True)
class Variant:
    name: str
    kernel: Any
    types: dict[str, Any]
    constants: dict[str, Any]
    warps: int | Callable[[int], int]  # or by capability

    @property
    def least_capability(self) -> int:
        return 89 if "/fp8" in self.name or f"*{FP8}" in self.types.values() else 80


def attention_variant(
    kind: str, stored: str, size: int, rows: int, splits: int, *, quantized: bool = False, chunks: bool = False
) -> Variant:
    """Queries of type `kind` over pages of type `stored`, T = rows, or `chunks` of prompts; `quantized`: to FP8."""
    fp8 = stored == FP8
    blocks = select_tile(rows * GROUP, size, 4 if kind == "fp32" else 2, fp8=fp8)
    types = dict.fromkeys(("q", "k", "v"), f"*{kind}") | dict.fromkeys(("k_pages", "v_pages"), f"*{stored}")
    types |= {"page_table": "*i64", "context_len": "*i64"} | ({"starts": "*i64"} if chunks else {"attn_mask": "*i32"})
    types |= dict.fromkeys(("k_scale", "v_scale"), "*fp32") if fp8 else {}
    types |= {"out": f"*{FP8}", "scale": "*fp32"} if quantized else {"out": f"*{kind}"}
    types |= {"partial": f"*{kind}", "lse": "*fp32", "arrived": "*i32"} if splits > 1 else {}
    types |= {"rows": "i32", "columns": "i32"}
    more = f"{' split' if splits > 1 else ''}{' to fp8' if quantized else ''}{' chunks' if chunks else ''}"
    return Variant(
        f"attention {kind}{'/fp8' if fp8 else ''} D={size} tile={blocks.rows}{more}",
        cascade_attention_kernel, types,
        attention.constants(blocks, size, KV_HEADS, GROUP, PAGE, splits, fp8=fp8),
        partial(chunk_warps, blocks, size, fp8=fp8) if chunks else blocks.warps,
    )  # fmt: skip


def write_variant(kind: str, stored: str, path: bool) -> Variant:
    types = {"k": f"*{kind}", "v": f"*{kind}", "k_pages": f"*{stored}", "v_pages": f"*{stored}"}
    types |= {"page_table": "*i64", "positions": "*i64", "keep": "*u1"} | ({"path": "*i64"} if path else {})
    types |= dict.fromkeys(("k_scale", "v_scale"), "*fp32") if stored == FP8 else {}
    types |= {"row_stride": "i64", "page_stride": "i64", "rows": "i32", "places": "i32", "columns": "i32"}
    return Variant(
        f"write {kind}{'/fp8' if stored == FP8 else ''}{' path' if path else ''}", write_pages_kernel, types,
        pages.constants(KV_HEADS * 128, PAGE, fp8=stored == FP8), pages.WARPS,
    )  # fmt: skip


#: A tree's columns, as `outputs` gives them.
COLUMNS = {
    **dict.fromkeys(("tokens", "parent", "depth", "branch_id"), "*i64"),
    "valid": "*u1", "score": "*fp32", "attn_mask": "*u1", "num_merged": "*i64",
}  # fmt: skip


#: Width, rows and lane of a source, and whether it stands at the root: drafts of 16 candidates, and a copy.
FIRST, SECOND, COPY = (16, 1, 0, True), (16, 7, 0, False), (1, 1, 1, True)


def growth_variant(nodes: int, *sources: tuple[int, int, int, bool]) -> Variant:
    kept = tuple("constexpr" if at_root else "*i64" for *_, at_root in sources)
    types: dict[str, Any] = {"anchor": "*i64", "draft_tokens": ("*i64",) * len(kept)}
    types |= {"draft_logprob": ("*fp32",) * len(kept), "kept": kept, "prefix_len": kept}
    types |= COLUMNS | {"scratch": "*i64", **dict.fromkeys(("tokens_stride", "logprob_stride"), ("i32",) * len(kept))}
    widths, counts, lanes, at_root = zip(*sources, strict=True)
    return Variant(
        f"grow {nodes} of {len(sources)} sources", grow_kernel, types | {"slots": "i32"},
        trees.growth_constants(nodes, widths, counts, lanes, at_root) | trees.tree_constants(nodes),
        trees.growth_warps(nodes, all(at_root), lanes[-1] + 1),
    )  # fmt: skip


def tree_variants() -> Iterator[Variant]:
    """Trees of the usual size, and the largest."""
    for nodes in (64, 1024):
        for sources in ((FIRST,), (FIRST, SECOND), (FIRST, SECOND, COPY)):
            yield growth_variant(nodes, *sources)
    given = {"candidate": "*i64", "path_score": "*fp32"}
    for count, size, nodes in ((8, 16, 64), (16, 16, 256), (8, 128, 1024)):
        yield Variant(
            f"merge {count}x{size} to {nodes}", candidates_kernel, given | COLUMNS,
            trees.candidates_constants(count, size) | trees.tree_constants(nodes),
            trees.candidates_warps(count, size, nodes),
        )  # fmt: skip
    strides = {"candidate_stride": "i32", "score_stride": "i32"}
    for nodes in (16, 128):
        yield Variant(
            f"chain {nodes}", chain_kernel, given | COLUMNS | strides, trees.tree_constants(nodes),
            trees.tree_warps(nodes),
        )  # fmt: skip
    types = dict.fromkeys(("tokens", "parent", "valid", "branch_id", "chosen", "path", "accepted", "packed"), "*i64")
    for nodes in (64, 1024):
        yield Variant(
            f"accept {nodes}", accept_kernel, types | {"valid": "*u1"}, trees.accept_constants(nodes, 16),
            trees.accept_warps(nodes),
        )  # fmt: skip


def branch_variants() -> Iterator[Variant]:
    """Of a block of 16: drafts of a few branches, and of the most; 32k tokens are drafted."""
    kinds = dict.fromkeys(("top1", "kept", "prefix_len", "rejected", "anchor"), "*i64") | {"confidence": "*fp32"}

    def types(*names: str) -> dict[str, str]:
        return {name: kinds.get(name, "i32") for name in names}

    for count in (4, 15):
        yield Variant(
            f"boundaries {count}", boundaries_kernel,
            types("top1", "confidence", "prefix_len", "rejected", "top1_stride", "confidence_stride"),
            trees.boundaries_constants(15, count), 1,
        )  # fmt: skip
        given = types("anchor", "kept", "prefix_len") | {"blocks": "*i64"}
        yield Variant(
            f"blocks {count}", blocks_kernel, given | types("kept_stride", "branch_stride", "mask_token"),
            trees.blocks_constants(15, count), 1,
        )  # fmt: skip
        of_two: dict[str, Any] = {"anchor": "*i64", "top1": ("*i64",) * 2, "confidence": ("*fp32",) * 2}
        of_two |= dict.fromkeys(("kept", "prefix_len"), ("constexpr", "*i64"))
        strides = dict.fromkeys(("top1_stride", "confidence_stride", "kept_stride", "branch_stride"), ("i32",) * 2)
        yield Variant(
            f"branches {count} to 64", branches_kernel, of_two | COLUMNS | strides,
            trees.branches_constants(15, (1, count)) | trees.tree_constants(64),
            trees.candidates_warps(1 + count, 16, 64),
        )  # fmt: skip
    for ids in (True, False):
        given = types("rejected", "prefix_len") | ({"ids": "*i64"} if ids else {}) | {"logits": "*bf16", "vocab": "i32"}
        yield Variant(
            f"rejected tokens{' of ids' if ids else ''}", mask_rejected_kernel, given,
            trees.mask_rejected_constants(15, 32768), 1,
        )  # fmt: skip


def handover_variants() -> Iterator[Variant]:
    """Of a request, and of a large batch."""
    rows = dict.fromkeys(("anchor", "context_len"), "*i64") | {"active": "*u1"}
    new = {"new_anchor": "*i64", "new_context_len": "*i64", "new_active": "*u1"}
    for size in (1, 32):
        given = rows | {"late": "*u1", "source": "*i64", "state": "*i64"} | new
        yield Variant(
            f"handover to {size}",
            begin_kernel,
            given | {"size": "i32", "rows": "i32"},
            handover.begin_constants(size),
            1,
        )
        given = {"context_len": "*i64", "active": "*u1"}
        given |= dict.fromkeys(("tokens", "count", "limit", "stop", "state"), "*i64")
        yield Variant(
            f"handover of {size}", end_kernel, given | dict.fromkeys(("count_stride", "size", "rows"), "i32"),
            handover.end_constants(size, 16, 8), handover.END_WARPS,
        )  # fmt: skip


def choice_variants(vocab: int) -> Iterator[Variant]:
    """Drafts of every width, and the target's choice, greedy and sampled."""
    for pool, width, sampled in ((1, 1, False), (16, 16, False), (64, 16, True)):
        constants = choices.pool_constants(vocab, pool, width)
        block = {"BLOCKS": constants["BLOCKS"], "BLOCK": choices.BLOCK}
        about = f"{width} of {vocab}{' sampled' if sampled else ''}"
        types = {"logits": "*bf16", "maxima": "*i32", "partial": "*fp32"}
        yield Variant(
            f"segments {about}", segments_kernel, types | {"vocab": "i32"}, block | {"SEG": constants["SEG"]},
            choices.WARPS,
        )  # fmt: skip
        parameters = {
            "context_len": "*i64", "temperature": "*fp32", "seed": "*i64", "min_p": "*fp32", "top_k": "*i64",
            "top_p": "*fp32",
        }  # fmt: skip
        types |= {"ids": "*i64"} | (parameters if sampled else {})
        flags = dict.fromkeys(("SAMPLED", "MIN_P", "TOP_K", "TOP_P"), sampled)
        yield Variant(
            f"pool {about}", pool_kernel, types | {"tokens": "*i64", "logprob": "*fp32", "vocab": "i32"},
            constants | flags | {"ROWS": 105, "SLOTS": 15}, choices.pool_warps(pool),
        )  # fmt: skip
    blocks = -(-vocab // choices.BLOCK)
    for sampled in (False, True):
        types = {"logits": "*bf16"}
        types |= {"temperature": "*fp32", "seed": "*i64", "context_len": "*i64", "depth": "*i64"} if sampled else {}
        types |= {"threshold": "*i32"} if sampled else {}
        yield Variant(
            f"scores of {vocab}{' sampled' if sampled else ''}", scores_kernel,
            types | {"partial": "*i64", "vocab": "i32"},
            {"ROWS": 64, "BLOCKS": blocks, "BLOCK": choices.BLOCK, "SAMPLED": sampled}, choices.WARPS,
        )  # fmt: skip
    filters = {"temperature": "*fp32", "min_p": "*fp32", "top_k": "*i64", "top_p": "*fp32", "threshold": "*i32"}
    yield Variant(
        f"filters of {vocab}", threshold_kernel, {"logits": "*bf16"} | filters | {"vocab": "i32"},
        {"ROWS": 64, "BLOCK": choices.BLOCK} | dict.fromkeys(("MIN_P", "TOP_K", "TOP_P"), True), choices.ROW_WARPS,
    )  # fmt: skip
    yield Variant(
        f"combine {vocab}", combine_kernel, {"partial": "*i64", "chosen": "*i64"},
        {"BLOCKS": blocks, "BLOCKSP": power(blocks)}, 1,
    )  # fmt: skip


def norm_variant(kind: str, width: int, *, fp8: bool) -> Variant:
    types = dict.fromkeys(("x", "branch", "weight", "total"), f"*{kind}")
    types |= {"out": f"*{FP8}", "scale": "*fp32"} if fp8 else {"out": f"*{kind}"}
    return Variant(
        f"add+norm {kind}{'/fp8' if fp8 else ''} E={width}", layer_kernels.add_rms_norm_kernel, types,
        layers.norm_constants(width, 1e-6, width, width), layers.norm_warps(width),
    )  # fmt: skip


def rope_variant(kind: str, size: int, *, context: bool = False, fp8: bool = False) -> Variant:
    """Of a layer, or keys and values of a drafter's context; of FP8 products over FP8 pages, with a bias."""
    types = {"qkv": "*fp32" if fp8 else f"*{kind}"} | dict.fromkeys(("cos", "sin"), f"*{kind}")
    types |= dict.fromkeys(("k_norm",) if context else ("q_norm", "k_norm"), f"*{kind}")
    types |= {"bias": f"*{kind}"} | dict.fromkeys(("scales", "k_scale", "v_scale"), "*fp32") if fp8 else {}
    types |= dict.fromkeys(("k", "v") if context else ("q", "k", "v"), f"*{kind}")
    queries = 0 if context else KV_HEADS * GROUP
    return Variant(
        f"qk+norm+rope {kind}{'/fp8' if fp8 else ''} D={size}{' context' if context else ''}",
        layer_kernels.qk_norm_rope_kernel, types | {"in_stride": "i64", "out_stride": "i64"},
        layers.rope_constants(queries, KV_HEADS, size, 1e-6), 1,
    )  # fmt: skip


def silu_variant(kind: str, *, fp8: bool) -> Variant:
    types = {"gate_up": "*fp32", "scales": "*fp32"} if fp8 else {"gate_up": f"*{kind}"}
    types |= {"out": f"*{FP8}", "scale": "*fp32"} if fp8 else {"out": f"*{kind}"}
    return Variant(
        f"silu*up {kind}{'/fp8' if fp8 else ''}", layer_kernels.silu_mul_kernel, types,
        layers.silu_constants(12288, layers.DTYPES[kind]), layers.WARPS,
    )  # fmt: skip


def layer_variants() -> Iterator[Variant]:
    """Between the products: Qwen3-8B's sizes, the largest norm, a head of no power of two."""
    for kind, fp8 in (("bf16", False), ("bf16", True), ("fp16", False), ("fp32", False)):
        yield norm_variant(kind, 4096, fp8=fp8)
        yield rope_variant(kind, 128, fp8=fp8)
        yield silu_variant(kind, fp8=fp8)
    yield norm_variant("bf16", 16384, fp8=False)
    yield rope_variant("bf16", 96)
    yield rope_variant("bf16", 256)
    yield rope_variant("bf16", 128, context=True)
    types = {"positions": "*i64", "frequencies": "*fp32", "cos": "*bf16", "sin": "*bf16"}
    yield Variant("rope tables", layer_kernels.rope_tables_kernel, types, layers.table_constants(64, 1.0), 1)
    types = {"x": "*bf16", "scale": "*fp32", "out": f"*{FP8}", "numbers": "i32"}
    yield Variant("quantize bf16", layer_kernels.quantize_kernel, types, {"BLOCK": layers.BLOCK}, layers.WARPS)


def linear_variant(kind: str, *, sums: bool = False) -> Variant:
    """Of `exact`, Qwen3-8B's gate and up; FP8 products scaled, or as `sums`."""
    types = {"x": f"*{kind}", "weight": f"*{kind}"}
    types |= {"x_scale": "*fp32", "weight_scale": "*fp32"} if kind == FP8 and not sums else {}
    types |= {"out": "*fp32" if sums else "*bf16" if kind == FP8 else f"*{kind}", "rows": "i32"}
    tile = invariant.LINEAR_TILES[{FP8: 1, "fp32": 4}.get(kind, 2)]
    name = "fp8" if kind == FP8 else kind
    return Variant(
        f"exact product {name}{' sums' if sums else ''}", linear_kernel, types,
        invariant.linear_constants(tile, 24576, 4096), tile.warps,
    )  # fmt: skip


def exact_variant(kind: str, stored: str, size: int, *, tree: bool) -> Variant:
    """Attention of `exact`, in several splits: rows of trees, or of a prompt's chunk."""
    fp8 = stored == FP8
    tile = invariant.attention_tile(size, 4 if kind == "fp32" else 2, fp8=fp8)
    types = dict.fromkeys(("q", "k", "v"), f"*{kind}") | dict.fromkeys(("k_pages", "v_pages"), f"*{stored}")
    types |= {"page_table": "*i64", "context_len": "*i64"} | ({"order": "*i32"} if tree else {})
    types |= dict.fromkeys(("k_scale", "v_scale"), "*fp32") if fp8 else {}
    types |= {"out": "*fp32", "lse": "*fp32"} | dict.fromkeys(("rows", "new", "first", "columns"), "i32")
    return Variant(
        f"exact attention {kind}{'/fp8' if fp8 else ''} D={size}{' tree' if tree else ''}", attention_kernel, types,
        invariant.attention_constants(tile, size, KV_HEADS, GROUP, PAGE, split=True, fp8=fp8), tile.warps,
    )  # fmt: skip


def exact_variants() -> Iterator[Variant]:
    """Every tile of `exact`."""
    for kind in ("bf16", "fp16", "fp32", FP8):
        yield linear_variant(kind)
    yield linear_variant(FP8, sums=True)
    for kind, stored in (("bf16", "bf16"), ("bf16", FP8), ("fp16", "fp16"), ("fp32", "fp32")):
        for size in (64, 96, 128, 256):
            yield exact_variant(kind, stored, size, tree=True)
        yield exact_variant(kind, stored, 128, tree=False)
    types = {"partial": "*fp32", "lse": "*fp32", "out": "*bf16", "splits": "i32"}
    yield Variant("exact merge D=128", merge_splits_kernel, types, {"HEAD": 128, "PADDED": 128}, 1)
    strides = dict.fromkeys(("rows", "request_stride", "row_stride", "column_stride"), "i32")
    order = {"attn_mask": "*u1", "order": "*i32"} | strides
    for columns in (64, 1024):
        yield Variant(
            f"key order {columns}", key_order_kernel, order,
            invariant.key_order_constants(columns), invariant.key_order_warps(columns),
        )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Every line of the table of block sizes at its smallest and its largest tile; split where batches are small."""
    for kind, stored in (("bf16", "bf16"), ("bf16", FP8), ("fp16", "fp16"), ("fp32", "fp32")):
        for size in (64, 96, 128, 256):
            yield attention_variant(kind, stored, size, rows=64, splits=1)
            yield attention_variant(kind, stored, size, rows=1, splits=4)
            yield attention_variant(kind, stored, size, rows=64, splits=1, chunks=True)
    for stored in ("bf16", FP8):  # of trees, small batches
        for quantized in (False, True):
            yield attention_variant("bf16", stored, 128, rows=64, splits=4, quantized=quantized)
    yield attention_variant("bf16", "bf16", 128, rows=1, splits=16, quantized=True)
    strides = ("rows", "request_stride", "row_stride", "column_stride")
    types = {"attn_mask": "*u1", "words": "*i32"} | dict.fromkeys(strides, "i32")
    yield Variant("pack mask", pack_mask_kernel, types, {}, 1)
    yield write_variant("bf16", "bf16", path=False)
    yield write_variant("bf16", "bf16", path=True)
    yield write_variant("bf16", FP8, path=True)
    yield from tree_variants()
    yield from branch_variants()
    yield from handover_variants()
    for vocab in (151_936, 32_000):
        yield from choice_variants(vocab)
    yield from layer_variants()
    yield from exact_variants()


def broken(done: Compiled, capability: int) -> list[str]:
    """The bounds that it exceeds."""
    most = MOST_SHARED_100 if capability == 100 else MOST_SHARED
    spilled = MOST_SPILLED_EXACT if done.name in ("linear_kernel", "attention_kernel") else MOST_SPILLED
    checks = {
        f"more than {most} bytes of shared memory": done.shared > most,
        "registers spill": done.spilled > (spilled if done.registers <= CHOSEN else 0),
        "needs scratch memory, which the launcher does not pass": done.scratch > 0,
        f"{done.parameters} parameters for {done.arguments} arguments and two scratch pointers": (
            done.parameters != done.arguments + 2
        ),
    }
    return [what for what, is_so in checks.items() if is_so]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES)
    chosen = parser.parse_args(arguments)
    print(f"{'kernel':<36} {'sm':>4} {'shared':>7} {'registers':>9} {'spilled':>7} {'seconds':>7}")
    failed = compiled = 0
    for variant in variants():
        for capability in chosen.capability:
            if chosen.only not in variant.name or capability < variant.least_capability:
                continue
            start = time.perf_counter()
            warps = variant.warps if isinstance(variant.warps, int) else variant.warps(capability)
            done = compile_kernel(variant.kernel, variant.types, variant.constants, capability, warps)
            faults = broken(done, capability)
            took = time.perf_counter() - start
            numbers = f"{done.shared:>7} {done.registers:>9} {done.spilled:>7} {took:>7.1f}"
            print(f"{variant.name:<36} {capability:>4} {numbers}", *faults, sep="  ! " if faults else "", flush=True)
            failed += bool(faults)
            compiled += 1
    print(f"{compiled} compiled, {failed} exceed a bound")
    return 1 if failed or not compiled else 0


if __name__ == "__main__":
    sys.exit(main())
