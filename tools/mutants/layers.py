"""Mutants of the kernels between a layer's products, and of the batch-invariant product."""

from __future__ import annotations

from tools.mutants.mutant import Mutant, interpreted, run

KERNEL, LINEAR = (f"plugins/layer_ops/triton/{name}.py" for name in ("kernel", "linear"))
SHARED = "plugins/shared/kernels.py"
LAYERS, PRODUCTS = interpreted("layers"), interpreted("exact", k="product")
#: Only one that is executed has the sums of tensor cores.
EXECUTED = ("fp8_products", "batch_invariant", "split_products")
FP8, INVARIANT, SHARES = (run(f"tests/ptx/test_{name}.py", marks="not full") for name in EXECUTED)
HEADS = run("tests/ptx/test_kernels.py", marks="", k="small_case and heads")

MUTANTS = [
    Mutant("C1 a mean over the padded width", KERNEL, "* (1.0 / WIDTH)", "* (1.0 / PADDED)", LAYERS),
    Mutant(
        "rows of context have embeddings",
        KERNEL,
        "value = tl.where(is_own, value,",
        "value = tl.where(True, value,",
        LAYERS,
    ),
    Mutant(
        "the weight of the first norm for context",
        KERNEL,
        "factor = tl.where(is_own, factor,",
        "factor = tl.where(own < 0, factor,",
        LAYERS,
    ),
    Mutant("the last row of a block is left out", KERNEL, "// (BLOCK - 1) + 1", "// (BLOCK - 1)", LAYERS),
    Mutant("positions of the first request", KERNEL, "tl.load(start + number // rows", "tl.load(start", LAYERS),
    Mutant("steps of the first row", KERNEL, "stride + number % rows", "stride", LAYERS),
    Mutant(
        "C2 V is rounded with the page scale of K",
        KERNEL,
        "value_a, value_b = _paged(value_a, value_scale, TYPE), _paged(value_b, value_scale, TYPE)",
        "value_a, value_b = _paged(value_a, key_scale, TYPE), _paged(value_b, key_scale, TYPE)",
        LAYERS,
    ),
    Mutant(
        "half of V is rounded with the page scale of K",
        KERNEL,
        "_paged(value_b, value_scale, TYPE)",
        "_paged(value_b, key_scale, TYPE)",
        LAYERS,
    ),
    Mutant("page scales of the first layer", KERNEL, "tl.load(v_scale + layer)", "tl.load(v_scale)", LAYERS),
    Mutant(
        "C3 a rotation that does not round its products",
        KERNEL,
        "((a * c).to(TYPE).to(tl.float32) + (-b * s).to(TYPE).to(tl.float32)).to(TYPE)",
        "(a * c + -b * s).to(TYPE)",
        LAYERS,
    ),
    Mutant("the norm of queries for keys", KERNEL, "mask=k_mask, other=0.0", "mask=q_mask, other=0.0", LAYERS),
    Mutant(
        "the total is not rounded",
        KERNEL,
        "        value = rounded.to(tl.float32)\n",
        "        value = value + added\n",
        LAYERS,
    ),
    Mutant(
        "V is turned too",
        KERNEL,
        "wide_a, wide_b = value_a.to(tl.float32), value_b.to(tl.float32)",
        "wide_a, wide_b = turned_a.to(tl.float32), turned_b.to(tl.float32)",
        LAYERS,
    ),
    Mutant("keys do not read their values", KERNEL, "tl.where(k_mask, HKV * 2 * HEAD, 0)", "0", LAYERS),
    Mutant("the gate has the scale of up", KERNEL, "tl.load(scales))", "tl.load(scales + 1))", LAYERS),
    Mutant(
        "the gate is not rounded before its product",
        KERNEL,
        "1.0 + faded).to(TYPE).to(tl.float32)",
        "1.0 + faded)",
        LAYERS,
    ),
    Mutant("tables without their factor", KERNEL, "(s * FACTOR)", "s", LAYERS),
    Mutant("too large for FP8", SHARED, "-448.0, 448.0", "-480.0, 480.0", LAYERS),
    Mutant(
        "the smaller of equal scores comes last",
        SHARED,
        "(ascending_of(score), place)",
        "(ascending_of(score), 0x7FFFFFFF - place)",
        interpreted("choices"),
    ),
    Mutant("-0.0 is smaller than 0.0", SHARED, "tl.where(score == 0.0, 0.0, score)", "score", interpreted("choices")),
    Mutant(
        "D1 many rows add from the last to the first",
        LINEAR,
        "        known = start + lane < IN\n",
        "        start = tl.where(rows > 16, (IN - 1) // BLOCK_K * BLOCK_K - start, start)\n"
        "        known = start + lane < IN\n",
        INVARIANT,
    ),
    Mutant("D2 FP8 sums of 14 bits without a bound", LINEAR, ", max_num_imprecise_acc=BLOCK_K", "", FP8),
    Mutant(
        "inputs past the last are read", LINEAR, "mask=real[:, None] & known[None, :]", "mask=real[:, None]", INVARIANT
    ),
    Mutant("the scale of x alone", LINEAR, "tl.load(x_scale) * tl.load(weight_scale)", "tl.load(x_scale)", FP8),
    Mutant(
        "the bias of the first tile",
        LINEAR,
        "tl.load(bias + column, mask",
        "tl.load(bias + column % BLOCK_N, mask",
        PRODUCTS,
    ),
    Mutant("all shares begin at the first inputs", LINEAR, "begin = tl.program_id(2) *", "begin = 0 *", SHARES),
    Mutant("the first share is added last", LINEAR, "range(1, SPLITS)", "range(SPLITS - 1, 0, -1)", SHARES),
    Mutant(
        "weights are asked for behind the wait",
        LINEAR,
        "        prefetch(weight + column * IN + begin, AHEAD)\n    wait_for_prior_kernels()\n",
        "        wait_for_prior_kernels()\n        prefetch(weight + column * IN + begin, AHEAD)\n",
        SHARES,
    ),
]
