"""Mutants of attention, of the pages that it reads, and of their writes.

Those of windows, sinks and the order of sums are in tests/plugins/kernels/, where they are tests.
"""

from __future__ import annotations

from tools.mutants.mutant import Mutant, interpreted, run

KERNEL, EXACT, ORDER = (
    f"plugins/cascade_attention/triton/{name}.py" for name in ("kernel", "exact_kernel", "key_order")
)
PAGES = "plugins/kv_pages/triton/kernel.py"
FAR = run("tests/ptx/test_far.py", marks="")
PARITY, ORDERS = run("tests/ptx/test_parity.py", marks="not full"), run("tests/ptx/test_orders.py", marks="")
FP8_PAGES = interpreted("exact", marks="", k="fp8_pages")
ATTENTION, INVARIANT, WRITES = interpreted("attention"), interpreted("exact"), interpreted("pages")

MUTANTS = [
    Mutant(
        "A1 the last part of a tile of the context is dropped",
        KERNEL,
        "    context_tiles = _tiles_of(context - front, BLOCK_N)\n",
        "    context_tiles = (context - front) // BLOCK_N\n",
        ATTENTION,
    ),
    Mutant(
        "A2 a row sees one token too many", KERNEL, "place < context - position", "place <= context - position", PARITY
    ),
    Mutant(
        "A3 V of another head",
        KERNEL,
        "tl.load((values_at + lane)[None, :] + at)",
        "tl.load((values_at + lane % HEAD)[None, :] + at)",
        ATTENTION,
    ),
    Mutant(
        "A4 who leaves before the last comes does not say so",
        KERNEL,
        '            word = tl.atomic_add(arrived, shares, sem="acq_rel")\n',
        '            word = tl.atomic_add(arrived, 0, sem="acq_rel")\n',
        ATTENTION,
    ),
    Mutant(
        "the bits of those that left stay for the next layer",
        KERNEL,
        '            tl.atomic_add(arrived, -left, sem="relaxed")\n',
        "            pass\n",
        ORDERS,
    ),
    Mutant(
        "nobody waits for other parts",
        KERNEL,
        "        while ((word >> 28) != 0) & (polls < POLLS):\n",
        "        while ((word >> 28) != 0) & (polls < 0):\n",
        ORDERS,
        survives="who leaves at once gives its share to the last, or takes it if the last has come: slower, and right",
    ),
    Mutant(
        "who leaves after the last has come merges nothing",
        KERNEL,
        "            if (word >> 28) != 0:\n                shares = 0\n",
        "            if (word >> 28) >= -8:\n                shares = 0\n",
        ORDERS,
    ),
    Mutant(
        "who leaves after the last has come leaves its bit",
        KERNEL,
        '                tl.atomic_add(arrived, -shares, sem="relaxed")\n',
        "                pass\n",
        ORDERS,
    ),
    Mutant(
        "who leaves reads without order that all have come",
        KERNEL,
        'tl.atomic_add(arrived, shares, sem="acq_rel")',
        'tl.atomic_add(arrived, shares, sem="relaxed")',
        ORDERS,
    ),
    Mutant(
        "who waits reads without order that all have come",
        KERNEL,
        'tl.atomic_add(arrived, 0, sem="acquire")',
        'tl.atomic_add(arrived, 0, sem="relaxed")',
        ORDERS,
    ),
    Mutant(
        "A5 no barrier before a split is announced",
        KERNEL,
        "        tl.debug_barrier()  # one thread announces the stores of all\n",
        "",
        PARITY,
        survives="Triton 3.7.1 puts a barrier in front of the addition itself",
    ),
    Mutant("A6 a split is announced without order", KERNEL, 'COME, sem="acq_rel"', 'COME, sem="relaxed"', PARITY),
    Mutant(
        "A7 offsets of pages have 32 bits",
        KERNEL,
        "at = at.to(tl.int64)[:, None]",
        "at = at.to(tl.int32)[:, None]",
        FAR,
    ),
    Mutant(
        "A8 V in pages has the scale of K",
        KERNEL,
        "_widened(values, value_scale, TYPE)",
        "_widened(values, key_scale, TYPE)",
        ATTENTION,
    ),
    Mutant(
        "A9 a merged result is not quantized",
        KERNEL,
        "    result = result * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]\n",
        "    result = result * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]\n    scale = None\n",
        ATTENTION,
    ),
    Mutant(
        "a window is one token shorter",
        KERNEL,
        "(position + place)[None, :] - bound[:, None] >= 0",
        "(position + place)[None, :] - bound[:, None] > 0",
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
