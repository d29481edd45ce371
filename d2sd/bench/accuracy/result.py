"""`d2sd eval`'s result: metrics, speed and answers of every run, as JSON and as one table."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from d2sd.bench.markdown import NONE, number, rate, table
from d2sd.bench.result import Provenance
from d2sd.errors import D2SDError
from d2sd.io import write_text

#: Log-likelihoods that differ by less are equal: the order of sums depends on what else is in the batch.
_TOLERANCE = 1e-3  # nats


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Metric(_Part):
    """A metric and its standard error."""

    value: float
    stderr: float | None


class Outcome(_Part):
    """One task under one policy on one bundle."""

    bundle: str
    precision: str  # fp32, bf16, fp16 or fp8
    policy: str
    task: str
    metrics: dict[str, Metric]
    answers: list[list[int] | float]  # tokens of each answer, or the log-likelihood in nats of each request
    differ: int | None  # answers that differ from plain decoding of the same bundle; None for that itself
    differ_from_first: int | None  # answers that differ from plain decoding of the first bundle
    truncated: int  # prompts whose first tokens were dropped
    seconds: float  # of engine steps
    tokens: int  # generated tokens, or prompt tokens of log-likelihoods
    accepted_length: float | None  # tokens per step; None where nothing is generated


class Accuracy(_Part):
    """One run of `d2sd eval`."""

    d2sd_eval: int = 1
    provenance: Provenance
    limit: int | None
    chat_template: bool
    max_new_tokens: int
    outcomes: list[Outcome]

    def save(self, path: Path) -> None:
        """Write the JSON atomically."""
        write_text(path, self.model_dump_json(indent=1) + "\n")

    def check(self) -> None:
        """Raise D2SDError if speculation changed an answer in fp32."""
        for one in self.outcomes:
            if one.differ and one.precision == "fp32":
                raise D2SDError(
                    "Speculation changed answers.", where=f"{one.bundle}, {one.task}, {one.policy}",
                    found=f"{one.differ} of {len(one.answers)}", expected="0 in fp32",
                    fix="d2sd bench shows whether the target's two best tokens were nearly tied there",
                )  # fmt: skip

    def table(self) -> str:
        """Markdown with a line for each metric; speeds of a task are in its first line."""
        lines = [
            (one, name, metric, first)
            for one in self.outcomes
            for first, (name, metric) in zip((True, *[False] * len(one.metrics)), one.metrics.items(), strict=False)
        ]
        several = len({one.bundle for one in self.outcomes}) > 1
        columns = [
            ("task", [one.task for one, *_ in lines]),
            ("metric", [name for _, name, *_ in lines]),
            *([("bundle", [one.bundle for one, *_ in lines])] if several else []),
            ("precision", [one.precision for one, *_ in lines]),
            ("policy", [one.policy for one, *_ in lines]),
            ("value", [_with_error(metric) for _, _, metric, _ in lines]),
            ("differ from plain decoding", [_share(one.differ, one, first) for one, _, _, first in lines]),
        ]
        if several:
            shares = [_share(one.differ_from_first, one, first) for one, _, _, first in lines]
            columns.append((f"differ from {self.outcomes[0].bundle}, plain", shares))
        columns += [
            ("tokens/s", [rate(one.tokens / one.seconds if first else None) for one, *_, first in lines]),
            ("accepted length", [number(one.accepted_length if first else None) for one, *_, first in lines]),
        ]
        return table(columns)


def count_different(answers: list[list[int] | float], reference: list[list[int] | float]) -> int:
    """Answers whose tokens differ, and log-likelihoods that differ by more than rounding."""
    return sum(not _same(one, other) for one, other in zip(answers, reference, strict=True))


def _same(one: list[int] | float, other: list[int] | float) -> bool:
    if isinstance(one, list) or isinstance(other, list):
        return one == other
    return abs(one - other) <= _TOLERANCE


def _with_error(metric: Metric) -> str:
    return f"{metric.value:.3f}" + ("" if metric.stderr is None else f" ± {metric.stderr:.3f}")


def _share(differ: int | None, outcome: Outcome, first: bool) -> str:
    return NONE if differ is None or not first else f"{differ} of {len(outcome.answers)}"
