"""Mutants of the scores of heads, and of the count of programs that they share with products."""

from __future__ import annotations

from tools.mutants.mutant import Mutant, interpreted

PAIRS, PROOF = "plugins/pair_scores/triton/kernels.py", interpreted("pairs")
ARRIVALS = "plugins/shared/arrivals.py"

MUTANTS = [
    Mutant(
        "candidates of the first slot stand behind those of the block before",
        PAIRS,
        "is_shown = is_known | (slot == 0)",
        "is_shown = is_known",
        PROOF,
    ),
    Mutant("what is known scores nothing", PAIRS, "tl.where(is_known, found, given)", "given + found * 0.0", PROOF),
    Mutant(
        "scores of a head that says nothing are rounded",
        PAIRS,
        "tl.where(says, scores - _log_add(rest, _log_sum(scores, 1)), given)",
        "scores - _log_add(rest, _log_sum(scores, 1))",
        PROOF,
    ),
    Mutant(
        "the walk is one slot behind",
        PAIRS,
        "taken_of = tl.where(turn == step, taken, taken_of)",
        "taken_of = tl.where(turn == step, earlier, taken_of)",
        PROOF,
    ),
    Mutant(
        "of equal scores the last leads on",
        PAIRS,
        "tl.min(tl.where((order == best) & inside[None, :], tl.arange(0, MP)[None, :], MP), axis=1)",
        "tl.max(tl.where((order == best) & inside[None, :], tl.arange(0, MP)[None, :], -1), axis=1)",
        PROOF,
    ),
    Mutant(
        "parents stay in the order given",
        PAIRS,
        "place = _ranks(of_parents, inside)",
        "place = tl.zeros_like(rank) + m[None, :]",
        PROOF,
    ),
    Mutant("the last but one walks", ARRIVALS, "== COUNT - 1", "== COUNT - 2", PROOF),
    Mutant("the count is not taken back", ARRIVALS, "tl.atomic_add(arrived, -COUNT", "tl.atomic_add(arrived, 0", PROOF),
]
