"""Requests and the limits of an engine: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from d2sd.errors import ContextLengthExceeded, RequestError
from d2sd.runtime.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_STOP_TOKENS, SamplingParams
from d2sd.runtime.thought import Markers

if TYPE_CHECKING:
    from d2sd.recipe import Limits as RecipeLimits
    from d2sd.runtime.grammar.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as token ids. `stop` strings need an engine with a decoder."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 256
    #: The engine reads what this says of logits; length, stops, n and form are read from it by who makes requests.
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_tokens: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    stop_visible: bool = False  # the text includes the stop string or stop token that ended it
    grammar: Grammar | None = None  # the answer is in its language, unless the length limit cuts it
    markers: Markers | None = None  # around a thought; read if it has a budget
    priority: int = 0  # lower values are served first
    #: Clients take turns, so that one with many requests does not keep the others waiting. It may be a secret.
    client: str = field(default="", repr=False)
    cache_salt: str = ""  # cached prefixes are shared among requests of the same salt only

    @property
    def policy(self) -> str | None:
        """The policy of `Engine.choices` that it asks for: `off` to speculate never; None: the engine's."""
        asked = self.sampling.speculative
        if isinstance(asked, bool):
            return None if asked else "off"
        return asked["policy"]

    @property
    def seed(self) -> int:
        """The seed of the noise; 0 where the parameters leave it open, which those of `each_completion` never do."""
        return self.sampling.seed or 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that an engine allocates memory for."""

    max_batch: int  # requests that decode together
    max_context: int  # prompt and answer of one request, in tokens
    page_size: int  # tokens a K/V page
    prefill_chunk: int  # prompt tokens computed between two decode steps
    kv_memory: float | int | None = None  # of the K/V pools: a share of the free memory (float), or bytes (int);
    # None: enough for max_batch requests of max_context tokens
    prefix_cache: bool = True  # keep full pages of finished requests for requests with the same prefix

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_context", "page_size", "prefill_chunk"):
            value = getattr(self, name)
            if value < 1:
                raise RequestError("a limit is too small", where=f"limits.{name}", found=value, expected="1 or more")

    @staticmethod
    def of(limits: RecipeLimits, max_batch: int | None = None) -> Limits:
        """The limits of a recipe, with another `max_batch` if given."""
        return Limits(
            max_batch or limits.max_batch,
            limits.max_context,
            limits.page_size,
            limits.prefill_chunk,
            limits.kv_memory,
            limits.prefix_cache,
        )

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def pages_within(self, window: int, block_size: int) -> int:
        """Most pages that a request has of layers that see `window` tokens; a step commits at most `block_size`.

        They hold what the next row sees, and the tokens that a chunk and a step, or two steps, commit.
        """
        ahead = block_size + max(self.prefill_chunk, block_size)
        return self.pages_for(window - 1 + ahead) + 1

    def check(self, request: Request, vocab_size: int) -> None:
        """Raise RequestError if these limits or the vocabulary can never fit the request."""
        if not request.prompt:
            raise RequestError("the prompt is empty", where="prompt", expected="at least one token")
        prompt, answer = len(request.prompt), request.max_new_tokens
        if prompt + answer > self.max_context:  # first: what follows reads the whole prompt
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_context} tokens. However, you requested "
                f"{prompt + answer} tokens ({prompt} in the {{prompt}}, {answer} in the completion).",
                where="{prompt}" if prompt >= self.max_context else "{max_tokens}",
                fix="shorten the {prompt} or lower {max_tokens}{or_longer}",
            )
        if bad := [t for t in request.prompt if not 0 <= t < vocab_size]:
            raise RequestError(
                "prompt token outside the vocabulary", where="prompt", found=bad[0], expected=f"0 .. {vocab_size - 1}"
            )
        if answer < 1:
            raise RequestError("nothing to generate", where="{max_tokens}", found=answer, expected="1 or more")
        _check_tokens(request, vocab_size)
        _check_stops(request)


def _check_tokens(request: Request, vocab_size: int) -> None:
    """Raise RequestError for a token outside the vocabulary in a parameter, or too large a min_tokens."""
    sampling = request.sampling
    if sampling.bad_words:
        raise RequestError(
            "The bad words are not tokens yet.",
            where="bad_words",
            found=sampling.bad_words,
            fix="pass bad_words_token_ids to the engine",
        )
    if sampling.thinking_token_budget is not None and request.markers is None:
        raise RequestError(
            "This model does not think between markers that its chat template names.",
            where="thinking_token_budget",
            found=sampling.thinking_token_budget,
            fix="leave it out",
        )
    named = {
        "thinking_token_budget": [] if request.markers is None else request.markers[2:],
        "logit_bias": sampling.logit_bias,
        "bad_words_token_ids": [token for word in sampling.bad_words_token_ids for token in word],
    }
    for where, tokens in named.items():
        for bad in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= bad < vocab_size:
                raise RequestError(
                    f"{where} has a token outside the vocabulary",
                    where=where,
                    found=bad,
                    expected=f"0 .. {vocab_size - 1}",
                )
    if sampling.min_tokens > request.max_new_tokens:
        raise RequestError(
            "min_tokens exceeds the answer's length",
            where="min_tokens",
            found=sampling.min_tokens,
            expected=f"at most {request.max_new_tokens}",
            fix="lower min_tokens or raise {max_tokens}",
        )


def _check_stops(request: Request) -> None:
    """Raise RequestError for more or longer stop strings, or more stop tokens, than an engine looks for."""
    strings, tokens = len(request.stop), len(request.stop_tokens)
    longest = max(map(len, request.stop), default=0)
    for what, where, fine, found, expected in (
        ("too many stop strings", "stop", strings <= MAX_STOP_STRINGS, strings, f"at most {MAX_STOP_STRINGS}"),
        ("a stop string is empty", "stop", all(request.stop), None, "at least one character"),
        ("a stop string is too long", "stop", longest <= MAX_STOP_LENGTH, longest, f"{MAX_STOP_LENGTH} characters"),
        ("too many stop tokens", "stop_token_ids", tokens <= MAX_STOP_TOKENS, tokens, f"at most {MAX_STOP_TOKENS}"),
    ):
        if not fine:
            raise RequestError(what, where=where, found=found, expected=expected)


# -- the few sizes that shapes are padded to --------------------------------------------------------------------------


def bucket(count: int) -> int:
    """The next power of two, or the middle before it: few batch sizes to capture, at most a third of the rows are
    padding.
    """
    most = power_of_two(count)
    middle = most * 3 // 4
    return middle if count <= middle else most


def buckets(max_count: int) -> list[int]:
    """Every bucket up to the first of at least `max_count`: 1, 2, 3, 4, 6, 8, 12, …"""
    return sorted({bucket(count) for count in range(1, max_count + 1)})


def power_of_two(count: int) -> int:
    """The next one: fewer sizes than of `bucket`, for lengths of page tables and chunks."""
    return 1 << (count - 1).bit_length()


def powers_of_two(max_count: int) -> list[int]:
    """Every one up to the first of at least `max_count`: 1, 2, 4, …"""
    return [1 << power for power in range((max_count - 1).bit_length() + 1)]


def floor_power_of_two(count: int) -> int:
    """The largest power of two that is not above `count`."""
    return 1 << (count.bit_length() - 1)
