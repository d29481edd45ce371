"""A program that answers the prompts of `benchmarks.peers`: a product with a way to decode and a type of weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Product = Literal["d2sd", "transformers", "llama.cpp"]
Weights = Literal["fp32", "bf16", "F32", "F16", "Q4_1"]  # GGUF's types are in capitals, as there
#: Bits of a weight, by which contestants are compared.
BITS: dict[Weights, int] = {"fp32": 32, "F32": 32, "bf16": 16, "F16": 16, "Q4_1": 4}
Tokens = list[int]


class Key(NamedTuple):
    """A contestant."""

    product: Product
    mode: str
    weights: Weights
    plain: bool  # decodes without speculation

    def __str__(self) -> str:
        return f"{self.product} {self.mode}, {self.weights}"

    @property
    def reference(self) -> Weights:
        """Type of the weights in d2sd's plain decoding with which answers are compared.

        llama.cpp's types are compared with fp32: they hold the same weights, but for the rounding of F16.
        """
        return "bf16" if self.weights == "bf16" else "fp32"


@dataclass(frozen=True)
class Passed:
    """One pass over some prompts."""

    seconds: float
    prefill: float  # of these, until prompts were computed; for peers the first token is in it
    steps: int  # passes of the target after the prefill
    answers: list[Tokens]


class Contestant(Protocol):
    """A loaded model with a way to decode."""

    @property
    def key(self) -> Key: ...

    def answer(self, prompts: Sequence[Tokens]) -> Passed:
        """Answer all prompts, as many at a time as it was made for."""
        ...


class Limits(NamedTuple):
    """The sizes that every contestant is made for."""

    in_flight: int
    max_new_tokens: int
    length: int  # of the longest prompt and its answer
    stop_tokens: frozenset[int]
    threads: int


def ended(answer: Sequence[int], stop_tokens: Collection[int]) -> Tokens:
    """An answer up to its first stop token, which is part of it."""
    ends = (position + 1 for position, token in enumerate(answer) if token in stop_tokens)
    return list(answer[: next(ends, len(answer))])
