"""Requests, sampling parameters and the limits of an engine: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from d2sd.errors import RequestError

if TYPE_CHECKING:
    from d2sd.recipe import Limits as RecipeLimits
    from d2sd.runtime.grammar.grammar import Grammar


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of the target's tokens. Temperature applies first, then top-k, then top-p (Hugging Face's order)."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    seed: int = 0  # the same seed gives the same text with speculation on or off, alone or in a batch

    def __post_init__(self) -> None:
        for name, fine, expected in (
            ("temperature", 0 <= self.temperature < 100, "0 (greedy) or more, below 100"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) .. 2^31 - 1"),
            ("seed", 0 <= self.seed < 2**64, "0 .. 2^64 - 1"),
        ):
            if not fine:  # NaN fails every comparison, so it is refused too
                raise RequestError(f"{name} out of range", where=name, found=getattr(self, name), expected=expected)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as token ids. `stop` strings need an engine with a decoder; they are left out of the text."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_tokens: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None  # the answer is in its language, unless the length limit cuts it


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that an engine allocates memory for."""

    max_batch: int  # requests that decode together
    max_context: int  # prompt and answer of one request, in tokens
    page_size: int  # tokens a K/V page
    prefill_chunk: int  # prompt tokens computed between two decode steps
    kv_memory: float | int | None = None  # of the K/V pools: a share of the free memory (float), or bytes (int);
    # None: enough for max_batch requests of max_context tokens

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_context", "page_size", "prefill_chunk"):
            value = getattr(self, name)
            if value < 1:
                raise RequestError("a limit is too small", where=f"limits.{name}", found=value, expected="1 or more")

    @staticmethod
    def of(limits: RecipeLimits, max_batch: int | None = None) -> Limits:
        """The limits of a recipe, with another `max_batch` if given."""
        return Limits(
            max_batch or limits.max_batch, limits.max_context, limits.page_size, limits.prefill_chunk, limits.kv_memory
        )

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def check(self, request: Request, vocab_size: int) -> None:
        """Raise RequestError if these limits or the vocabulary can never fit the request."""
        if not request.prompt:
            raise RequestError("the prompt is empty", where="prompt", expected="at least one token")
        if bad := [t for t in request.prompt if not 0 <= t < vocab_size]:
            raise RequestError(
                "prompt token outside the vocabulary", where="prompt", found=bad[0], expected=f"0 .. {vocab_size - 1}"
            )
        if request.max_new_tokens < 1:
            raise RequestError(
                "nothing to generate", where="max_new_tokens", found=request.max_new_tokens, expected="1 or more"
            )
        total = len(request.prompt) + request.max_new_tokens
        if total > self.max_context:
            raise RequestError(
                "the request does not fit the context", where="prompt + max_new_tokens",
                found=f"{len(request.prompt)} + {request.max_new_tokens} = {total}",
                expected=f"at most {self.max_context}",
                fix="shorten the prompt, lower max_new_tokens, or raise limits.max_context in the recipe",
            )  # fmt: skip
