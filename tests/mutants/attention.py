"""Mutants of attention, of the pages that it reads, and of their writes.

Those of windows, sinks and the order of sums are in tests/plugins/kernels/, where they are tests.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant, interpreted, run

KERNEL, EXACT, ORDER = (
    f"plugins/cascade_attention/triton/{name}.py" for name in ("kernel", "exact_kernel", "key_order")
)
PAGES = "plugins/kv_pages/triton/kernel.py"
FAR = run("tests/ptx/test_far.py", marks="")
PARITY = run("tests/ptx/test_parity.py")
FP8_PAGES = interpreted("exact", marks="", k="fp8_pages")
ATTENTION, INVARIANT, WRITES = interpreted("attention"), interpreted("exact"), interpreted("pages")

MUTANTS = [
    Mutant(
        "A1 the last part of a tile of the context is dropped",
        KERNEL,
        "        share = tl.cdiv(tl.cdiv(context, BLOCK_N), SPLITS) * BLOCK_N\n",
        "        share = tl.cdiv(context // BLOCK_N, SPLITS) * BLOCK_N\n",
        ATTENTION,
    ),
    Mutant("A2 a row sees one token too many", KERNEL, "known = token < end\n", "known = token <= end\n", PARITY),
    Mutant(
        "A3 V of another head",
        KERNEL,
        "tl.load(v + at, mask=mask, other=0.0)",
        "tl.load(v + at % HEAD, mask=mask, other=0.0)",
        ATTENTION,
    ),
    Mutant(
        "A4 the count of splits is not set back",
        KERNEL,
        "            tl.store(arrived + place, 0)\n",
        "            pass\n",
        PARITY,
    ),
    Mutant(
        "A5 no barrier before a split is announced",
        KERNEL,
        "        tl.debug_barrier()  # one thread announces the stores of all\n",
        "",
        PARITY,
        survives="Triton 3.7.1 puts a barrier in front of the addition itself",
    ),
    Mutant("A6 a split is announced without order", KERNEL, 'sem="acq_rel"', 'sem="relaxed"', PARITY),
    Mutant("A7 offsets of pages have 32 bits", KERNEL, "page.to(tl.int64) * PAGE", "page.to(tl.int32) * PAGE", FAR),
    Mutant(
        "A8 V in pages has the scale of K",
        KERNEL,
        "tl.load(v_pages + at, mask=mask, other=0.0), value_scale",
        "tl.load(v_pages + at, mask=mask, other=0.0), key_scale",
        ATTENTION,
    ),
    Mutant(
        "A9 a merged result is not quantized",
        KERNEL,
        "        result = sums * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]\n",
        "        result = sums * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]\n        scale = None\n",
        ATTENTION,
    ),
    Mutant(
        "a window is one token shorter",
        KERNEL,
        "token[None, :] - bound[:, None] >= 0",
        "token[None, :] - bound[:, None] > 0",
        ATTENTION,
    ),
    Mutant(
        "bits of a mask in reverse",
        KERNEL,
        "tl.sum(seen << bit, 0)",
        "tl.sum(seen << (31 - bit), 0)",
        interpreted("layers", k="masks"),
    ),
    Mutant(
        "shared tiles of the batch-invariant kernel: offsets of pages have 32 bits",
        EXACT,
        "        slot = ((page.to(tl.int64) * PAGE + position % PAGE) * HKV + head)[:, None] * HEAD + lane[None, :]\n"
        "        keys = _paged(",
        "        slot = ((page.to(tl.int32) * PAGE + position % PAGE) * HKV + head)[:, None] * HEAD + lane[None, :]\n"
        "        keys = _paged(",
        FAR,
    ),
    Mutant(
        "tiles behind them: offsets of pages have 32 bits",
        EXACT,
        "        slot = ((page.to(tl.int64) * PAGE + position % PAGE) * HKV + head)[:, None] * HEAD + lane[None, :]\n"
        "        at = ",
        "        slot = ((page.to(tl.int32) * PAGE + position % PAGE) * HKV + head)[:, None] * HEAD + lane[None, :]\n"
        "        at = ",
        FAR,
    ),
    Mutant(
        "D3 tiles begin at the context's end",
        EXACT,
        "    shared = context // BLOCK_N * BLOCK_N\n",
        "    shared = context\n",
        INVARIANT,
    ),
    Mutant(
        "V in shared tiles has the scale of K",
        EXACT,
        "_paged(v_pages + slot, value_scale,",
        "_paged(v_pages + slot, key_scale,",
        FP8_PAGES,
    ),
    Mutant(
        "V of single rows has the scale of K",
        EXACT,
        "_gathered(v_pages + slot, v + at, value_scale,",
        "_gathered(v_pages + slot, v + at, key_scale,",
        FP8_PAGES,
    ),
    Mutant(
        "parts of a merge from the last to the first",
        EXACT,
        "        at = split * lines + line\n        size",
        "        at = (splits - 1 - split) * lines + line\n        size",
        INVARIANT,
        survives="a fixed order too: any one will do",
    ),
    Mutant(
        "keys from the last to the first",
        ORDER,
        "    rank = tl.cumsum(seen, 0) - 1\n",
        "    rank = tl.sum(seen, 0) - tl.cumsum(seen, 0)\n",
        INVARIANT,
    ),
    Mutant(
        "a leader that sees other keys",
        ORDER,
        "(unlike == 0) & (other < rows)",
        "(unlike >= 0) & (other < rows)",
        INVARIANT,
    ),
    Mutant("B1 the scale of the first layer for V", PAGES, "tl.load(v_scale + layer)", "tl.load(v_scale)", WRITES),
    Mutant("V is rounded with the scale of K", PAGES, "tl.load(v_scale + layer)", "tl.load(k_scale + layer)", WRITES),
    Mutant(
        "B2 offsets of written pages have 32 bits",
        PAGES,
        "mask=kept, other=0).to(tl.int64)",
        "mask=kept, other=0).to(tl.int32)",
        FAR,
    ),
    Mutant(
        "B2b offsets of layers have 32 bits", PAGES, "layer * page_stride", "(layer * page_stride).to(tl.int32)", FAR
    ),
    Mutant(
        "rows that are not kept are written",
        PAGES,
        "kept = (tl.load(keep + place) != 0) &",
        "kept = (tl.load(keep + place) >= 0) &",
        WRITES,
    ),
    Mutant("rows past the page table are written", PAGES, " & (block < columns)", "", FAR),
]
