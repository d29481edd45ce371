"""The kernel of heads: the pair head's, DFlash 2's and DSpark's sizes, chains and trees."""

from __future__ import annotations

from functools import partial
from typing import Any

from d2sd.plugins.pair_scores import Factors, conditioned
from d2sd.plugins.pair_scores.triton.kernels import pairs_kernel
from d2sd.plugins.trees import Draft
from tests.plugins.cases import TYPES, Check, Kernel, some

SLOTS, VOCABULARY = 7, 49152


def pairs(kind: str, size: int, rank: int, width: int, form: str) -> None:
    shape = (2, 7, SLOTS)
    draft = Draft(some("i64", *shape, size), some("fp32", *shape, size))
    table = some(kind, VOCABULARY, rank)
    before = some(kind, *shape, 1 + size, rank) if form == "each" else table
    of_slot = some(kind, *shape, rank) if form == "slot" else None
    blocks = some("i64", 2, 7, SLOTS + 1)
    conditioned.triton(blocks, draft, Factors(before, table, of_slot), 16, some("fp32", 2), width)


def looked_up(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """A row of a table for each candidate and each parent; of blocks their slots."""
    rows, candidates = values["tokens"].shape[:-1].numel(), values["tokens"].numel()
    row = values["RANK"] * values["behind"].element_size()
    touched = {"behind": candidates * row, "blocks": rows * values["blocks"].element_size()}
    if not values["EACH"]:
        touched["before"] = candidates * row
    return touched, 2 * candidates * values["M"] * values["RANK"]


RUNS = {
    f"{name} {kind}, {width} of {size}": partial(pairs, kind, size, rank, width, form)
    for name, size, rank, form in (
        ("pair", 16, 128, "slot"),
        ("selector", 32, 256, "slot"),
        ("markov", 32, 256, "table"),
        ("gated", 32, 256, "each"),
    )
    for kind in ("bf16", "fp32")
    for width in (1, 16)
}
KERNELS = (
    Kernel(
        pairs_kernel,
        ("table", "following", "arrived", "best_tokens", "best_logprob", "best_table"),
        {f"pairs of {name}": run for name, run in RUNS.items()},
        reads_back=("table", "following", "arrived"),
        touched=looked_up,
    ),
)
CHECKS = {"pairs": Check("pairs", "pairs.test_a_draft", (TYPES["bf16"], 5, 20, "SLOT", 4))}
