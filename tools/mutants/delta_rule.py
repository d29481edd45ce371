"""Mutants of the gated delta rule, its recurrence and the convolution in front of it."""

from __future__ import annotations

from tools.mutants.mutant import Mutant, interpreted

CLOSED, STEPS, INPUTS = (
    f"plugins/delta_rule/triton/{name}.py" for name in ("closed_form", "recurrence", "convolution")
)
TREES = interpreted("delta_rule", k="trees and not bit_for_bit")
CHUNKS, COMMITS = interpreted("delta_rule", k="chunks"), interpreted("delta_rule", k="commits or bit_for_bit")
CONVOLVED = interpreted("delta_rule", k="convolution")

MUTANTS = [
    Mutant(
        "a row changes its own value twice",
        CLOSED,
        "a = tl.where(place[:, None] > place[None, :], (factor * over_key)[:, None] * decay * own, 0.0)\n        p =",
        "a = tl.where(place[:, None] >= place[None, :], (factor * over_key)[:, None] * decay * own, 0.0)\n        p =",
        TREES,
    ),
    Mutant("one block less is solved", CLOSED, "tl.range(1, BLOCKS)", "tl.range(2, BLOCKS)", TREES),
    Mutant(
        "gates of 16 bits",
        CLOSED,
        "tl.maximum(tl.load(g + at, mask=real, other=0.0), -104.0)",
        "tl.maximum(tl.load(g + at, mask=real, other=0.0), -104.0).to(tl.bfloat16).to(tl.float32)",
        TREES,
    ),
    Mutant(
        "earlier tiles fade by their own gates",
        CLOSED,
        "_decay(theirs, coarse, fine, other_coarse, other_fine)",
        "_decay(theirs, coarse, fine, other_coarse * 0.5, other_fine)",
        TREES,
    ),
    Mutant(
        "bit 31 of a word", CLOSED, "(start % 32 + column < 32)[None, :]", "(start % 32 + column < 31)[None, :]", TREES
    ),
    Mutant(
        "a chunk's state does not fade",
        CLOSED,
        "kept * tl.load(of_head_state + inside)",
        "tl.load(of_head_state + inside)",
        CHUNKS,
    ),
    Mutant("padding's state is written", CLOSED, "mask=slot > 0", "mask=slot >= 0", CHUNKS),
    Mutant("gates stay open", STEPS, "state *= tl.exp(tl.load(g + of_head))", "state *= 1.0", COMMITS),
    Mutant(
        "padding commits",
        STEPS,
        "tl.where(slot > 0, tl.load(count + request), 0)",
        "tl.load(count + request)",
        COMMITS,
        survives="the store has its own bound",
    ),
    Mutant(
        "the first layer's rows for all",
        STEPS,
        "first += layer * tl.num_programs(1) * rows",
        "first += layer * 0",
        COMMITS,
    ),
    Mutant("a parent's neighbour", INPUTS, "column < at), column, -1)", "column <= at), column, -1)", CONVOLVED),
    Mutant("taps from the first on", INPUTS, "channel * TAPS + TAPS - 1 - back", "channel * TAPS + back", CONVOLVED),
    Mutant(
        "kept from the last place on",
        INPUTS,
        "        source = length + place\n",
        "        source = length + place + 1\n",
        CONVOLVED,
    ),
]
