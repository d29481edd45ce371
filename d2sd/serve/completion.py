"""Completions as the Python API returns them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from d2sd.runtime.sequence import FinishReason, TokenLogprobs
    from d2sd.runtime.sequence import Sequence as Finished
    from d2sd.runtime.stats import SequenceStats


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at one position, in the target's distribution before any sampling parameter."""

    logprob: float
    rank: int  # 1 for the likeliest token
    decoded_token: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt; with n > 1 the first of them, and `outputs` has all."""

    prompt_token_ids: list[int]
    text: str  # without special tokens and, by default, without the stop string
    token_ids: list[int]  # generated tokens; the stop token is the last one where it ended the completion
    finish_reason: FinishReason  # "stop" or "length"
    stats: SequenceStats  # accepted lengths, tau and policies of this request
    seed: int = 0  # the same text again with this seed and n = 1
    index: int = 0  # among the n completions of the prompt
    logprobs: list[dict[int, Logprob]] | None = None  # of each token: its own and the likeliest tokens', by token id
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the same for the prompt; None for its first token
    others: tuple[Completion, ...] = ()  # the further n - 1 completions, at index 0

    @property
    def outputs(self) -> list[Completion]:
        """All n completions of the prompt, this one first."""
        return [self, *self.others]


def make_completion(answers: Sequence[tuple[Finished, str]], show: Callable[[int], str]) -> Completion:
    """Join the n finished requests of a prompt, each with its text; `show` turns a token id into text."""
    first, *others = (_one(sequence, index, text, show) for index, (sequence, text) in enumerate(answers))
    return replace(first, others=tuple(others))


def _one(sequence: Finished, index: int, text: str, show: Callable[[int], str]) -> Completion:
    assert sequence.finish is not None
    request = sequence.request
    logprobs = prompt_logprobs = None
    if request.sampling.logprobs is not None:
        logprobs = [by_token(entry, show) for entry in sequence.logprobs]
    if request.sampling.prompt_logprobs is not None:
        prompt_logprobs = [None, *(by_token(entry, show) for entry in sequence.prompt_logprobs)]
    return Completion(
        list(request.prompt),
        text,
        sequence.answer,
        sequence.finish,
        sequence.stats,
        request.seed,
        index,
        logprobs,
        prompt_logprobs,
    )


def by_token(entry: TokenLogprobs, show: Callable[[int], str]) -> dict[int, Logprob]:
    """The position's own token first, then the likeliest ones."""
    ranked = [(entry.token, entry.logprob, entry.rank)]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1) if token != entry.token]
    return {token: Logprob(logprob, rank, show(token)) for token, logprob, rank in ranked}
