"""Counts and times of speculation, per request and per engine, in plain Python. All lengths include the bonus token."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import product

#: `branch_id` of the first draft's nodes; i >= 1 is the i-th branch (ranked by boundary score).
FIRST_DRAFT = 0
#: In place of the number of a branch: a copy of earlier text.
COPY = -1

#: Drafted tokens of one tenth of predicted acceptance: their number, the sum of predictions, the number accepted.
Bin = tuple[int, float, int]


@dataclass(slots=True)
class SequenceStats:
    """Counts over the decode steps of one request."""

    accepted: Counter[int] = field(default_factory=Counter)  # tokens committed by a step, bonus included -> steps
    #: Who proposed the last accepted node (`Policy.proposer`) -> steps with a draft accepted
    accepted_branches: Counter[int] = field(default_factory=Counter)
    verified_nodes: int = 0
    policies: Counter[str] = field(default_factory=Counter)  # policy -> steps
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens whose K/V came from the prefix cache

    def record(self, accepted: int, accepted_branch: int, rows: int, policy: str) -> None:
        self.accepted[accepted] += 1
        self.policies[policy] += 1
        self.verified_nodes += rows
        if accepted > 1:
            self.accepted_branches[accepted_branch] += 1

    @property
    def steps(self) -> int:
        return self.accepted.total()

    @property
    def tokens(self) -> int:
        """Tokens committed, those past a stop token or the length limit included."""
        return sum(length * count for length, count in self.accepted.items())

    @property
    def tau(self) -> float:
        """Mean accepted length: tokens per step."""
        return self.tokens / self.steps if self.steps else 0.0

    def joint_acceptance(self) -> list[float]:
        """Joint acceptance: share of steps that accepted at least k drafts, for k = 1, 2, …"""
        deepest = max(self.accepted, default=1)
        return [sum(c for n, c in self.accepted.items() if n > k) / self.steps for k in range(1, deepest)]

    def conditional_acceptance(self) -> list[float]:
        """Share of the steps with at least k - 1 accepted drafts that accepted at least k, for k = 1, 2, …"""
        joint = self.joint_acceptance()
        return [now / before for before, now in zip([1.0, *joint], joint, strict=False)]

    @staticmethod
    def merged(parts: Iterable[SequenceStats]) -> SequenceStats:
        """The sums over several requests: their `tau` is weighted by steps."""
        total = SequenceStats()
        for part, count in product(parts, fields(SequenceStats)):
            setattr(total, count.name, getattr(total, count.name) + getattr(part, count.name))
        return total


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of an engine at one moment, and counts since its start."""

    waiting: int  # requests
    running: int
    pages_total: int  # K/V pages that requests can use
    pages_used: int  # by running requests; a shared page counts once
    pages_cached: int  # pages in the prefix cache that no running request uses: they are evicted when pages run out
    prefix_queried_tokens: int  # prompt tokens of admitted requests, the last of each prompt left out
    prefix_hit_tokens: int  # of these, the ones found in the prefix cache
    prefill_tokens: int  # computed: the misses, and what preempted requests recompute
    preemptions: int
    steps: int  # decode steps
    policy: str  # of the last step
    slots_total: int = 0  # of recurrent state, that requests can use; 0: the target has none
    slots_used: int = 0  # by running requests
    slots_cached: int = 0  # snapshots of the prefix cache: evicted when slots run out

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache; 0 before the first request."""
        return self.prefix_hit_tokens / max(self.prefix_queried_tokens, 1)


def mean_tau(parts: Iterable[SequenceStats]) -> float:
    """Mean over requests of each request's tau: the papers' definition (z-lab, D²SD)."""
    values = [part.tau for part in parts if part.steps]
    return sum(values) / len(values) if values else 0.0


def reliability_bins(outcomes: Iterable[tuple[float, bool]]) -> list[Bin]:
    """Ten equal bins of (predicted acceptance, accepted)."""
    counts, predicted, accepted = [0] * 10, [0.0] * 10, [0] * 10
    for prob, is_accepted in outcomes:
        index = min(int(prob * 10), 9)
        counts[index] += 1
        predicted[index] += prob
        accepted[index] += is_accepted
    return list(zip(counts, predicted, accepted, strict=True))


def calibration_error(bins: Sequence[Bin]) -> float | None:
    """Expected calibration error: mean over drafted tokens of |mean predicted acceptance - share accepted| of the
    token's bin (ten equal bins). 0 is a drafter that knows how often it is right.
    """
    # The docstring is printed under the tables of d2sd bench. None: no drafted token at all.
    count = sum(number for number, _, _ in bins)
    return sum(abs(predicted - accepted) for _, predicted, accepted in bins) / count if count else None


@dataclass(slots=True)
class Clock:
    """Host seconds by stage. On CUDA launches are asynchronous, so only the sums over whole steps are meaningful."""

    seconds: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def clear(self) -> None:
        """Reset the clock, for example after a warm-up."""
        self.seconds.clear()
        self.steps = 0

    @property
    def step_seconds(self) -> float:
        """Mean time of a decode step, prefill left out."""
        return sum(s for name, s in self.seconds.items() if name != "prefill") / max(self.steps, 1)
