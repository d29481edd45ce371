"""State of one request in the engine; the comment of a field names what changes it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from d2sd.errors import D2SDError, GenerationError, UnexpectedError
from d2sd.policies import DrafterRole
from d2sd.runtime.grammar.grammar import Matcher, advance
from d2sd.runtime.pages import page_row
from d2sd.runtime.request import Request
from d2sd.runtime.stats import SequenceStats
from d2sd.runtime.text import TextStream
from d2sd.token_codes import NONE_LEFT, NOT_FINITE

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the target's distribution before any sampling parameter."""

    token: int
    logprob: float  # of `token`
    rank: int  # of `token`, 1 for the likeliest
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and their log-probabilities, best first

    def best(self, count: int) -> TokenLogprobs:
        """The entry with `count` likeliest tokens."""
        return replace(self, top=self.top[:count])


@dataclass(frozen=True, slots=True)
class Output:
    """The tokens and text that one request gained in one step."""

    sequence: Sequence
    tokens: tuple[int, ...]
    text: str  # released in this step; "" without a decoder
    finish: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `tokens`, if the request asks


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. The last token is the *anchor*: chosen, but not computed yet. Everything before it is context.

    The last prompt token is the first anchor, so the prefill needs no logits and every generated token comes out of the
    same decode step.
    """

    id: int
    request: Request
    tokens: list[int]  # prompt and answer; grows in append
    text: TextStream | None = None  # fed in append
    turn: int = 0  # its place among the turns of all clients; set by the scheduler
    cached: int = 0  # leading tokens whose K/V is in the pools; set by the scheduler, prefill and append
    pages: array[int] = field(default_factory=page_row)  # set by the scheduler, as are the next four
    windowed_pages: array[int] = field(default_factory=page_row)  # the same of layers with a window; 0 if freed
    state_id: int = 0  # of its recurrent state, behind `cached` tokens; 0: none
    page_keys: list[bytes] = field(default_factory=list, repr=False)  # of the leading full pages, in the prefix cache
    keyed_pages: int = 0  # leading pages that the prefix cache knows by their keys
    admitted: float | None = None  # time.monotonic() of its first place in the batch; set by the scheduler
    launched: int = 0  # decode steps with a row of it whose tokens are not appended yet; set by the scheduler
    finish: FinishReason | None = None  # set by append, cancel and fail
    error: D2SDError | None = None  # set by append and fail
    matcher: Matcher | None = field(init=False)  # advanced by append
    stop_tokens: list[int] = field(init=False, repr=False)  # the request's, sorted
    policy: str | None = field(init=False)  # the request's
    speculates: bool = field(init=False)  # else its steps verify one row, whatever its neighbours'
    bias: Any = field(default=None, repr=False)  # `Entries` of its parameters, on the device; set by the first step
    counts: Any = field(default=None, repr=False)  # `Counts` of its tokens, on the device, while a step needs them
    stats: SequenceStats = field(default_factory=SequenceStats)
    acceptance: Any = field(default=None, repr=False)  # a `RequestAcceptance`; set and changed where `auto` chooses
    #: Leading tokens whose features have gone to a drafter, at least; set by the engine, cleared by the scheduler.
    injected: dict[DrafterRole, int] = field(default_factory=dict, repr=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the answer, if asked; grows in append
    prompt_logprobs: SequenceOf[TokenLogprobs] = ()  # of the prompt after its first token, if asked

    def __post_init__(self) -> None:
        self.matcher = self.request.grammar.matcher() if self.request.grammar is not None else None
        self.stop_tokens = sorted(self.request.stop_tokens)
        self.policy = self.request.policy
        self.speculates = self.policy != "off"

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def pending(self) -> int:
        """Context tokens still to be prefilled."""
        return len(self.tokens) - 1 - self.cached

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_new_tokens - (len(self.tokens) - len(self.request.prompt))

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether prompt_logprobs are asked for and incomplete, so that every prompt token must be computed."""
        requested = self.request.sampling.prompt_logprobs is not None
        return requested and len(self.prompt_logprobs) < len(self.request.prompt) - 1

    def ends_at(self, token: int) -> bool:
        """Whether the answer ends at a token; at an end token of a grammar always, because nothing may follow."""
        return token in self.request.stop_tokens or (self.matcher is not None and token in self.matcher.end_tokens)

    def _problem(self, token: int) -> GenerationError | None:
        """Advance the grammar by a token; why the answer cannot go on with it, or None if it can."""
        if token == NOT_FINITE:
            return UnexpectedError(
                "The target's logits are not finite numbers.",
                where="logits",
                found="NaN or infinity",
                fix="check the target's weights, and whether they overflow at this precision",
            )
        where, problem = "bad_words, logit_bias, min_tokens", ""
        if self.matcher is not None:
            where = "structured_outputs"
            problem = self.matcher.error if token == NONE_LEFT else advance(self.matcher, token)
        if token == NONE_LEFT:
            both = "both the grammar and the request's other" if self.matcher is not None else "the request's"
            problem = problem or f"no token passes {both} parameters"
        return GenerationError("The answer cannot go on.", where=where, found=problem) if problem else None

    def fail(self, error: Exception) -> Output:
        """End the answer with an error."""
        self.finish, self.error = "error", GenerationError.of(error)
        return Output(self, (), "", "error")

    def append(self, tokens: SequenceOf[int], logprobs: SequenceOf[TokenLogprobs] = ()) -> Output:
        """Append the tokens that a step committed, up to the one that ends the answer; the rest are dropped.

        `logprobs` are those of `tokens`, empty unless the step computed them.
        """
        request = self.request
        self.cached += len(tokens)
        appended, shown, text = [], list[int](), ""
        for token in tokens:
            self.error = self._problem(token)
            if self.error is not None:
                self.finish = "error"
                break
            appended.append(token)
            self.tokens.append(token)
            length = len(self.tokens) - len(request.prompt)
            may_stop = length > request.sampling.min_tokens
            if self.ends_at(token) and may_stop:
                self.finish = "stop"
            if self.finish is None or request.stop_visible:
                shown.append(token)
            if self.text is not None and request.stop and shown:
                text += self.text.feed(shown.pop(), may_stop=may_stop and self.finish is None)
                if self.text.stopped:
                    self.finish = "stop"
            if self.finish is None and length >= request.max_new_tokens:
                self.finish = "length"
            if self.finish is not None:
                break
        if self.text is not None and shown:
            text = self.text.feed_all(shown)
        if self.finish is not None and self.text is not None:
            text += self.text.flush()
            if self.text.stopped:  # the last characters, held back until now, complete a stop string
                self.finish = "stop"
        width = request.sampling.logprobs
        reported = () if width is None else tuple(entry.best(width) for entry in logprobs[: len(appended)])
        self.logprobs += reported
        return Output(self, tuple(appended), text, self.finish, reported)
