"""`peers.json`: every contestant, with one request and with several in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median

from benchmarks.cpu.contestant import BITS, Key, Passed, Tokens, Weights
from benchmarks.cpu.machine import Machine, read_seconds
from d2sd.bench.result import Part, Provenance, ResultFile


class Figures(Part):
    """One contestant; a list has one entry for each repetition."""

    key: Key
    in_flight: int
    tokens_per_second: list[float]
    step_ms: list[float]
    prefill_ms: list[float]  # a prompt
    equal: int  # answers that are those of d2sd's plain decoding with weights of `key.reference`
    answers: int

    @classmethod
    def of(
        cls, key: Key, in_flight: int, repetitions: Sequence[Sequence[Passed]], reference: Sequence[Tokens]
    ) -> Figures:
        """The passes of a repetition answer the prompts of `reference` in their order."""
        found = [[answer for passed in one for answer in passed.answers] for one in repetitions]
        return cls(
            key=key,
            in_flight=in_flight,
            tokens_per_second=[
                sum(map(len, answers)) / _sum(one, "seconds") for answers, one in zip(found, repetitions, strict=True)
            ],
            step_ms=[1e3 * (_sum(one, "seconds") - _sum(one, "prefill")) / _sum(one, "steps") for one in repetitions],
            prefill_ms=[1e3 * _sum(one, "prefill") / len(reference) for one in repetitions],
            equal=sum(a == b for answers in found for a, b in zip(answers, reference, strict=True)),
            answers=sum(map(len, found)),
        )


def _sum(passes: Sequence[Passed], name: str) -> float:
    return float(sum(getattr(passed, name) for passed in passes))


class Floor(Part):
    """The least time of a plain step: to read all weights once."""

    weight_bytes: int
    ms: float


class Result(ResultFile):
    """`peers.json`."""

    provenance: Provenance
    machine: Machine
    prompts: str
    max_new_tokens: int
    floors: dict[Weights, Floor]
    figures: list[Figures]
    notes: list[str]  # what was left out, and what to do about it

    def baseline(self, figures: Figures, *, same_bits: bool) -> Figures | None:
        """The fastest plain decoding of a peer as many in flight; `same_bits`: with weights of the same size."""
        peers = [
            one
            for one in self.figures
            if one.key.plain
            and one.key.product != "d2sd"
            and one.in_flight == figures.in_flight
            and (not same_bits or BITS[one.key.weights] == BITS[figures.key.weights])
        ]
        return max(peers, key=lambda one: median(one.tokens_per_second), default=None)

    def beaten(self) -> dict[Weights, float]:
        """Milliseconds of the fastest plain step by type of weights, where it is below the floor: then it is none."""
        steps = {
            weights: min(
                (ms for f in self.figures if f.key.plain and f.key.weights == weights for ms in f.step_ms), default=inf
            )
            for weights in self.floors
        }
        return {weights: ms for weights, ms in steps.items() if ms < self.floors[weights].ms}

    def gain(self, figures: Figures, *, same_bits: bool) -> float | None:
        """Median over repetitions of the tokens a second over the baseline's, which were measured in turns."""
        baseline = self.baseline(figures, same_bits=same_bits)
        if baseline is None:
            return None
        pairs = zip(figures.tokens_per_second, baseline.tokens_per_second, strict=True)
        return median(one / other for one, other in pairs)


def floors(sizes: Mapping[Weights, int], before: Mapping[Weights, Floor] | None = None) -> dict[Weights, Floor]:
    """The floor of each type of weights from their bytes, measured; the lower one of an earlier measurement."""
    times = {size: 1e3 * read_seconds(size) for size in set(sizes.values())}
    return {
        weights: Floor(weight_bytes=size, ms=min(times[size], before[weights].ms if before else inf))
        for weights, size in sizes.items()
    }
