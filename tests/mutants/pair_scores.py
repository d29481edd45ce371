"""Mutants of the scores of heads."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, interpreted

PAIRS, PROOF = "plugins/pair_scores/triton/kernels.py", interpreted("pairs")

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
        "the walk ends one slot early", PAIRS, "for step in range(slot - 1):", "for step in range(slot - 2):", PROOF
    ),
    Mutant(
        "of equal scores the last leads on",
        PAIRS,
        "tl.min(tl.where((order == best) & inside[None, :], tl.arange(0, MP)[None, :], MP), axis=1)",
        "tl.max(tl.where((order == best) & inside[None, :], tl.arange(0, MP)[None, :], -1), axis=1)",
        PROOF,
    ),
    Mutant("parents stay in the order given", PAIRS, "place = _ranks(of_parents, inside, MP)", "place = m", PROOF),
]
