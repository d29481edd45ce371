"""What the launchers hand to Triton is what `make kernels` compiles: the same types, the same constants.

Triton binds the arguments and compiles for an H100 that is not there; nothing is launched.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

from d2sd.plugins.batch_invariant.triton import launch as invariant
from d2sd.plugins.cascade_attention import ChunkMask, PagedContext
from d2sd.plugins.cascade_attention.triton import launch as attention
from d2sd.plugins.choice.triton import launch as choices
from d2sd.plugins.handover.triton import launch as handover
from d2sd.plugins.kv_pages.triton import launch as pages
from d2sd.plugins.kv_pages.triton.kernel import write_pages_kernel
from d2sd.plugins.layer_ops import Heads
from d2sd.plugins.layer_ops.triton import kernel as layer_kernels
from d2sd.plugins.layer_ops.triton import launch as layers
from d2sd.plugins.trees import Branches, Draft, Source
from d2sd.plugins.trees.triton import launch as trees

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "compile_kernels.py"))
triton.runtime.driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
)  # fmt: skip


class Bound:
    """Stands in for a kernel: binds and compiles where that would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compiled(*arguments: Any, **options: Any) -> None:
            self.source = self.kernel.warmup(*arguments, grid=grid, **options).src

        return compiled

    def types(self) -> dict[str, str]:
        return {name: kind for name, kind in self.source.signature.items() if kind != "constexpr"}

    def constants(self) -> dict[str, Any]:
        whole = ((*place, value) for place, value in self.source.constants.items() if len(place) == 1)  # of no tuple
        found = {self.kernel.arg_names[place]: value for place, value in whole}
        return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("splits", "quantized", "chunks"), [(1, False, False), (4, False, False), (4, True, False), (1, False, True)]
)
def test_attention(splits: int, quantized: bool, chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = bound(monkeypatch, attention, "cascade_attention_kernel")
    q, k = torch.zeros(1, 1, 32, 128, dtype=torch.bfloat16), torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16)
    stored, one = torch.zeros(3, 16, 8, 128, dtype=torch.float8_e4m3fn), torch.ones(())
    table, length, mask = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, dtype=torch.long), torch.ones(1, 1, 1)
    context, scale = PagedContext(stored, stored, table, length, one, one), one if quantized else None
    asked = ChunkMask((1,), torch.arange(2)) if chunks else mask.int()
    attention.launch(q, k, k, context, asked, splits=splits, scale=scale)
    kinds = {"quantized": quantized, "chunks": chunks}
    variant = SCRIPT["attention_variant"]("bf16", SCRIPT["FP8"], 128, rows=1, splits=splits, **kinds)
    assert_compiled_ahead(kernel, variant)


def test_write(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Bound(write_pages_kernel)
    monkeypatch.setattr(pages, "write_pages_kernel", bound)
    rows, stored = torch.zeros(2, 1, 5, 8, 128).bfloat16(), torch.zeros(2, 3, 16, 8, 128).bfloat16()
    places = torch.zeros(1, 4, dtype=torch.long)
    pages.write_pages_triton(rows, rows, stored, stored, places, places, places == 0, places)
    variant = SCRIPT["write_variant"]("bf16", "bf16", path=True)
    strides = {"row_stride": "i32", "page_stride": "i32"}  # 64 bits where a pool is large, as it is compiled ahead
    assert bound.types() == variant.types | strides
    assert bound.constants() == variant.constants


def bound(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> list[Bound]:
    """Stand-ins for these kernels of a launcher's module, bound alone: `make kernels` compiles the same."""
    monkeypatch.setattr("triton.compiler.compile", lambda src, **_: SimpleNamespace(src=src))
    found = [Bound(getattr(module, name)) for name in names]
    for name, kernel in zip(names, found, strict=True):
        monkeypatch.setattr(module, name, kernel)
    return found


def assert_compiled_ahead(kernel: Bound, variant: Any) -> None:
    assert kernel.types() == variant.types
    assert kernel.constants() == {name: value for name, value in variant.constants.items() if value is not None}


@pytest.mark.parametrize("names", [("FIRST",), ("FIRST", "SECOND"), ("FIRST", "SECOND", "COPY")])
def test_growth(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = bound(monkeypatch, trees, "grow_kernel")
    of_names = {"FIRST": source(15, 16), "SECOND": source(15, 16, 7), "COPY": source(15, 1)}
    trees.growth_triton(torch.zeros(2, dtype=torch.long), [of_names[name] for name in names], 64)
    assert_compiled_ahead(kernel, SCRIPT["growth_variant"](64, *(SCRIPT[name] for name in names)))


def source(slots: int, width: int, count: int = 0) -> Source:
    """Of two requests; with branches it replaces the source before it."""
    tokens = torch.zeros(2, *([count] if count else []), slots, width, dtype=torch.long)
    branches = Branches(tokens[..., 0], tokens[..., 0, 0], tokens[..., 0, 0]) if count else None
    return Source(Draft(tokens, tokens.float()), branches, replaces=count > 0)


def test_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    merge, chain, accept = bound(monkeypatch, trees, "candidates_kernel", "chain_kernel", "accept_kernel")
    made = {variant.name: variant for variant in SCRIPT["tree_variants"]()}
    tokens = torch.zeros(2, 8, 16, dtype=torch.long)
    trees.candidates_triton(tokens, tokens.float(), 64)
    assert_compiled_ahead(merge, made["merge 8x16 to 64"])
    trees.chain_triton(tokens[:, 0], tokens[:, 0].float())
    assert_compiled_ahead(chain, made["chain 16"])
    node = torch.zeros(2, 64, dtype=torch.long)
    trees.accept_triton(node, node, node > 0, node, node, 16)
    assert_compiled_ahead(accept, made["accept 64"])


def test_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("boundaries_kernel", "blocks_kernel", "branches_kernel", "mask_rejected_kernel")
    boundaries, blocks, branches, rejected = bound(monkeypatch, trees, *names)
    made = {variant.name: variant for variant in SCRIPT["branch_variants"]()}
    tokens, number = torch.zeros(2, 4, 15, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)
    first, anchor = (tokens[:, 0].clone(), tokens[:, 0].float()), number[:, 0].clone()
    trees.boundaries_triton(*first, 4)
    assert_compiled_ahead(boundaries, made["boundaries 4"])
    trees.blocks_triton(anchor, tokens, number, 99)
    assert_compiled_ahead(blocks, made["blocks 4"])
    trees.branches_triton(anchor, [source(15, 1), source(15, 1, 4)], 64)
    assert_compiled_ahead(branches, made["branches 4 to 64"])
    logits = torch.zeros(2, 4, 15, 32768, dtype=torch.bfloat16)
    for ids, name in ((torch.arange(32768), "rejected tokens of ids"), (None, "rejected tokens")):
        trees.mask_rejected_triton(logits, number, number, ids)
        assert_compiled_ahead(rejected, made[name])


def test_handover(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, end = bound(monkeypatch, handover, "begin_kernel", "end_kernel")
    made = {variant.name: variant for variant in SCRIPT["handover_variants"]()}
    number, tokens = torch.zeros(32, dtype=torch.long), torch.zeros(32, 16, dtype=torch.long)
    state = torch.zeros(3, 33, dtype=torch.long)
    handover.begin_triton(number, number, number > 0, number > 0, number, state)
    assert_compiled_ahead(begin, made["handover to 32"])
    handover.end_triton(number, number > 0, tokens, tokens[:, 0], number, tokens[:, :8], state)
    assert_compiled_ahead(end, made["handover of 32"])


@pytest.mark.parametrize("sampled", [False, True])
def test_choices(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("segments_kernel", "pool_kernel", "scores_kernel", "combine_kernel", "threshold_kernel")
    segments, pool, scores, combine, threshold = bound(monkeypatch, choices, *names)
    vocab, one, number = 32_000, torch.ones(1), torch.ones(1, dtype=torch.long)
    logits = torch.zeros(1, 7, 15, vocab, dtype=torch.bfloat16)
    parameters = SimpleNamespace(
        temperature=one, seed=number, min_p=one, top_k=number, top_p=one, any_min_p=True, any_top_k=True, any_top_p=True
    )
    sampling: Any = parameters if sampled else None
    choices.candidates_triton(logits, number, 16, 64 if sampled else 16, torch.arange(vocab), sampling)
    choices.choose_triton(logits[:, :4].reshape(1, 60, vocab), number, torch.zeros(1, 60, dtype=torch.long), sampling)
    made = {variant.name: variant for variant in SCRIPT["choice_variants"](vocab)}
    more = " sampled" if sampled else ""
    assert_compiled_ahead(segments, made[f"segments 16 of 32000{more}"])
    assert_compiled_ahead(pool, made[f"pool 16 of 32000{more}"])
    assert scores.types() == made[f"scores of 32000{more}"].types
    assert combine.types() == made["combine 32000"].types
    if sampled:
        assert threshold.types() == made["filters of 32000"].types


@pytest.mark.parametrize("fp8", [False, True])
def test_layers(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-8B's sizes; FP8 is its products' sums and pages."""
    names = ("add_rms_norm_kernel", "qk_norm_rope_kernel", "silu_mul_kernel")
    bound = [Bound(getattr(layer_kernels, name)) for name in names]
    for name, stand_in in zip(names, bound, strict=True):
        monkeypatch.setattr(layers, name, stand_in)
    x, one = torch.zeros(2, 4096).bfloat16(), torch.ones(1)
    scale = one if fp8 else None
    layers.add_rms_norm(x, x, x[0], 1e-6, total=x, scale=scale)
    of_products = {"bias": torch.zeros(1, 6144).bfloat16(), "scales": torch.ones(1, 3), "k_scale": one, "v_scale": one}
    heads = Heads(32, 8, 128, 1e-6, x[0, :128], x[:1, :128], **(of_products if fp8 else {}))
    product, kept = torch.float32 if fp8 else torch.bfloat16, torch.zeros(1, 2, 8, 128).bfloat16()
    layers.qk_norm_rope(torch.zeros(1, 2, 6144, dtype=product), x[:, :64].clone(), x[:, :64].clone(), heads, kept, kept)
    layers.silu_mul(torch.zeros(2, 24576, dtype=product), torch.bfloat16, scales=scale, scale=scale)
    variants = [
        SCRIPT["norm_variant"]("bf16", 4096, fp8=fp8), SCRIPT["rope_variant"]("bf16", 128, fp8=fp8),
        SCRIPT["silu_variant"]("bf16", fp8=fp8),
    ]  # fmt: skip
    for found, variant in zip(bound, variants, strict=True):
        strides = {name: "i32" for name in variant.types if name.endswith("_stride")}  # 64 bits where a pass is large
        assert found.types() == variant.types | strides
        assert found.constants() == variant.constants


@pytest.mark.parametrize("fp8", [False, True])
def test_batch_invariant_kernels(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "linear_kernel", "attention_kernel", "merge_splits_kernel", "key_order_kernel"
    linear, attend, merge, order = bound(monkeypatch, invariant, *names)
    made = {variant.name: variant for variant in SCRIPT["exact_variants"]()}
    kind, one = torch.float8_e4m3fn if fp8 else torch.bfloat16, torch.ones(())
    x, weight = torch.zeros(3, 4096).to(kind), torch.empty(24576, 4096, dtype=kind)
    invariant.linear_triton(x, weight, None, (one, one) if fp8 else None, torch.bfloat16)
    assert_compiled_ahead(linear, made["exact product fp8" if fp8 else "exact product bf16"])
    if fp8:
        invariant.linear_triton(x, weight, None, None, torch.float32)
        assert_compiled_ahead(linear, made["exact product fp8 sums"])
    q, k = torch.zeros(2, 64, 32, 128).bfloat16(), torch.zeros(2, 64, 8, 128).bfloat16()
    stored, table = torch.zeros(3, 16, 8, 128).to(kind), torch.zeros(2, 512, dtype=torch.long)
    context = PagedContext(stored, stored, table, table[:, 0], *((one, one) if fp8 else ()))
    keys = invariant.key_order_triton(torch.ones(2, 64, 64, dtype=torch.bool))
    assert_compiled_ahead(order, made["key order 64"])
    for tree in (True, False):
        invariant.attention_triton(q, k, k, context, keys if tree else None)
        variant = made[f"exact attention bf16{'/fp8' * fp8} D=128{' tree' * tree}"]
        assert_compiled_ahead(attend, variant)
    assert_compiled_ahead(merge, made["exact merge D=128"])
