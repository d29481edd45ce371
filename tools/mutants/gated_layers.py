"""Mutants of the kernels of gated attention and of gated delta nets."""

from __future__ import annotations

from tools.mutants.mutant import Mutant, interpreted

KERNEL, HEADS = (f"plugins/{op}/triton/kernel.py" for op in ("gated_layers", "layer_ops"))
TESTS = ("heads", "gated_norm", "delta_inputs", "one_and_a_weight")
GATES, NORM, INPUTS, OFFSET = (interpreted("gated_layers", k=name) for name in TESTS)

MUTANTS = [
    Mutant("a gate of the head's query", KERNEL, "(2 * head + 1)[:, None]", "(2 * head)[:, None]", GATES),
    Mutant(
        "a gate without its bias", KERNEL, "(gate + tl.load(bias + column,", "(gate + 0 * tl.load(bias + column,", GATES
    ),
    Mutant("z of the first heads of a group", KERNEL, "head % GROUP * SIZE", "0 * head", NORM),
    Mutant(
        "z is gated by itself alone", KERNEL, "(gate * _sigmoid(gate, INTERPRET))", "_sigmoid(gate, INTERPRET)", NORM
    ),
    Mutant(
        "the norm is not rounded",
        KERNEL,
        "[:, None]).to(TYPE).to(tl.float32)\n    factor",
        "[:, None])\n    factor",
        NORM,
    ),
    Mutant(
        "the parent is the first ancestor",
        KERNEL,
        "seen & (number < at), number, -1",
        "seen & (number < 1), number, -1",
        INPUTS,
    ),
    Mutant("inputs of the state one too old", KERNEL, "+ TAPS - 1 + at\n", "+ TAPS - 2 + at\n", INPUTS),
    Mutant("the oldest tap comes first", KERNEL, "+ TAPS - 1 - back, mask", "+ back, mask", INPUTS),
    Mutant(
        "a chunk goes on to the last row",
        KERNEL,
        "tl.load(starts + request + 1)",
        "tl.load(starts + tl.num_programs(2))",
        INPUTS,
    ),
    Mutant("a has the scale of b", KERNEL, "of_a, is_v, scales, 3", "of_a, is_v, scales, 2", INPUTS),
    Mutant(
        "norms round twice",
        HEADS,
        "(normed * (1.0 + factor.to(tl.float32)))",
        "(normed.to(TYPE).to(tl.float32) * (1.0 + factor.to(tl.float32)))",
        OFFSET,
    ),
    Mutant(
        "all of a head rotates",
        HEADS,
        "turned_a = tl.where((lane < ROTARY)[None, :], turned_a, a.to(TYPE))",
        "turned_a = turned_a",
        GATES,
    ),
    Mutant("keys begin where queries without gates end", HEADS, "head + HQ)[:, None]", "head)[:, None]", GATES),
]
