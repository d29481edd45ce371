"""A clock of decode steps of Qwen3-8B's geometry behind 2,048 tokens, for GPUs that tests do not have.

Milliseconds by (policy, nodes, branches) at 1, 4, 8, 16 and 32 in flight: table 3 of a review of the GPU path (26 Nov
2026), predicted by a model that fits five steps measured on an H100. Rows of `ddtree` with 16 nodes, those of the H100
and those of FP8 with 16 nodes are that review's table 4: tokens a plain step over the tokens a step that it names
(2.70 and 3.14 of `ddtree`, 2.89 and 3.40 of `hybrid`). The review has none of `hybrid` with one branch in FP8:
interpolated by the rows of its second pass; none of an H100 in FP8: the H200's times the ratio of the two in bf16; none
of an H100's chain: that of `ddtree` with 16 nodes.

Between its rows: verification and second pass cost a little a row up to RIDGE rows of the whole batch, and beyond it
what the table's rows say; between its batch sizes along a line.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from d2sd.runtime.speculation.policy import Policy

BATCHES = 1, 4, 8, 16, 32
#: (policy, nodes, branches) -> milliseconds at BATCHES.
Rows = Mapping[tuple[str, int, int], tuple[float, ...]]
#: Rows of a second pass by branch: a block without its anchor.
_BLOCK = 15
#: A row below the ridge over one above it.
_FLAT = 0.06


def _times(plain: tuple[float, ...], *steps: float) -> tuple[float, ...]:
    return tuple(one * many for one, many in zip(plain, steps, strict=True))


def _by_tau(plain: tuple[float, ...], tau: float, *rates: float) -> tuple[float, ...]:
    """Steps that make `tau` tokens, at `rates` tokens in the time of a plain one."""
    return tuple(one * tau / rate for one, rate in zip(plain, rates, strict=True))


H200 = 4.85, 5.07, 5.45, 6.21, 7.74
H200_FP8 = 3.49, 3.70, 4.08, 4.85, 6.37
H100 = 6.54, 6.85, 7.38, 8.44, 10.57  # 6.54 was measured; what requests add is the H200's by the rates of memory

TABLE: dict[str, Rows] = {
    "H200 bf16": {
        ("off", 1, 0): H200,
        ("chain", 16, 0): (6.13, 6.24, 7.04, 10.6, 19.6),
        ("ddtree", 16, 0): _by_tau(H200, 2.70, 2.14, 2.19, 2.09, 1.58, 1.07),
        ("ddtree", 64, 0): (6.20, 9.12, 15.9, 29.8, 58.0),
        ("hybrid", 16, 1): (7.18, 7.35, 8.28, 12.4, 23.1),
        ("hybrid", 16, 4): (7.21, 7.89, 10.1, 16.4, 30.7),
        ("hybrid", 64, 4): (7.28, 10.7, 18.9, 35.6, 69.1),
    },
    "H200 FP8": {
        ("off", 1, 0): H200_FP8,
        ("chain", 16, 0): (4.29, 4.40, 5.14, 7.68, 13.8),
        ("ddtree", 16, 0): _by_tau(H200_FP8, 2.70, 2.19, 2.27, 2.15, 1.70, 1.25),
        ("ddtree", 64, 0): _by_tau(H200_FP8, 3.14, 2.51, 1.79, 1.16, 0.74, 0.50),
        ("hybrid", 16, 1): (4.88, 5.01, 5.84, 8.57, 15.3),
        ("hybrid", 16, 4): _by_tau(H200_FP8, 2.89, 2.06, 2.02, 1.77, 1.33, 0.95),
        ("hybrid", 64, 4): (4.97, 7.38, 12.6, 23.5, 45.3),
    },
    "H100 bf16": {
        ("off", 1, 0): H100,
        ("chain", 16, 0): _by_tau(H100, 2.70, 2.16, 2.20, 2.17, 2.02, 1.37),
        ("ddtree", 16, 0): _by_tau(H100, 2.70, 2.16, 2.20, 2.17, 2.02, 1.37),
        ("ddtree", 64, 0): _by_tau(H100, 3.14, 2.48, 2.27, 1.43, 0.89, 0.58),
        ("hybrid", 16, 1): _times(H100, 1.47, 1.44, 1.46, 1.57, 2.32),
        ("hybrid", 16, 4): _times(H100, 1.47, 1.47, 1.65, 2.02, 3.01),
        ("hybrid", 64, 4): _times(H100, 1.48, 1.63, 2.60, 4.21, 6.50),
    },
}
TABLE["H100 FP8"] = {
    row: tuple(
        one * slow / fast
        for one, slow, fast in zip(steps, TABLE["H100 bf16"][row], TABLE["H200 bf16"][row], strict=True)
    )
    for row, steps in TABLE["H200 FP8"].items()
}
#: Rows of a batch from which products are bound by arithmetic.
RIDGE = {"H200 bf16": 160, "H200 FP8": 160, "H100 bf16": 256, "H100 FP8": 256}


@dataclass(frozen=True)
class Card:
    """A GPU and a type of weights, by its key in TABLE."""

    name: str

    def seconds(self, policy: Policy, batch: int) -> float:
        """Seconds of a step of so many requests."""
        place = min(max(1, bisect_left(BATCHES, batch)), len(BATCHES) - 1)
        low, high = BATCHES[place - 1 : place + 1]
        least, most = (self._at(policy, size) for size in (place - 1, place))
        return (least + (most - least) * (batch - low) / (high - low)) / 1000

    def _at(self, policy: Policy, column: int) -> float:
        rows = {row: steps[column] for row, steps in TABLE[self.name].items()}
        if policy.name in ("off", "chain"):
            return rows[policy.name, policy.num_nodes, 0]
        small, large = rows["ddtree", 16, 0], rows["ddtree", 64, 0]
        alone = small + (large - small) * self._between(policy.num_nodes, 16, 64, BATCHES[column])
        if not policy.num_branches:
            return alone
        one, four = rows["hybrid", 16, 1], rows["hybrid", 16, 4]
        part = self._between(policy.num_branches * _BLOCK, _BLOCK, 4 * _BLOCK, BATCHES[column])
        return alone - small + one + (four - one) * part

    def _between(self, rows: int, few: int, many: int, batch: int) -> float:
        """The part of what `many` rows a request cost more than `few` that so many do."""

        def cost(rows: int) -> float:
            return _FLAT * rows * batch + max(0.0, rows * batch - RIDGE[self.name])

        return (cost(rows) - cost(few)) / (cost(many) - cost(few))
