"""Requests, sampling parameters and the limits of an engine: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from d2sd.errors import RequestError

if TYPE_CHECKING:
    from d2sd.policies import PolicyName
    from d2sd.recipe import Limits as RecipeLimits
    from d2sd.runtime.grammar.grammar import Grammar


#: Most alternatives that logprobs report for a token, as in vLLM and in OpenAI's API.
MAX_LOGPROBS = 20
#: Bounds of the repetition penalty: it multiplies a logit by up to 100, the lowest temperature by up to 1e5 more, so
#: logits up to 1e31 stay finite in fp32, which ends at 3e38.
PENALTIES = 0.01, 100.0

# What a request carries is bounded, because the engine's thread works on it between two steps of everybody. The bounds
# are far above what OpenAI's API takes (4 stop strings, 300 biases) and what users of vLLM send.

#: Biases of a request: enough to ban a script from a large vocabulary; a step adds all of them.
MAX_LOGIT_BIAS = 32_768
#: Token sequences that a request bans, tokens of one, and tokens of all; a step compares all with the text.
MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE, MAX_BAD_TOKENS = 2_048, 1_024, 32_768
#: Stop strings of a request, and characters of one; each new character is looked up in each string.
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 1_024
#: Stop tokens of a request, the target's own included.
MAX_STOP_TOKENS = 8_192


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of the target's tokens, with vLLM's names and order.

    First the logits are changed, for greedy requests too: logit_bias, bad_words, min_tokens, then the penalties. Then
    come temperature, min_p, top_k and top_p, each on the probabilities that the one before it left.
    """

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    seed: int = 0  # the same seed gives the same text with speculation on or off, alone or in a batch
    min_p: float = 0.0  # least probability, as a share of the best token's; 0: off
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or answer, multiplies negative ones
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer
    frequency_penalty: float = 0.0  # subtracted once for each occurrence in the answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not occur, begun in the prompt or not
    min_tokens: int = 0  # answer tokens before which neither stop tokens nor stop strings end it
    logprobs: int | None = None  # report each token's log-probability and those of this many best tokens
    prompt_logprobs: int | None = None  # the same for the prompt's tokens

    def __post_init__(self) -> None:
        counts, words = (self.logprobs, self.prompt_logprobs), self.bad_words
        biases = [bias for _, bias in self.logit_bias[: MAX_LOGIT_BIAS + 1]]
        for name, fine, expected in (
            ("temperature", 0 <= self.temperature < 100, "0 (greedy) or more, below 100"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) .. 2^31 - 1"),
            ("seed", 0 <= self.seed < 2**64, "0 .. 2^64 - 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 (off) .. 1"),
            ("repetition_penalty", PENALTIES[0] <= self.repetition_penalty <= PENALTIES[1], "0.01 .. 100; 1 is off"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 .. 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 .. 2"),
            ("logit_bias", len(biases) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} biases"),
            ("logit_bias", all(-100 <= bias <= 100 for bias in biases), "biases of -100 .. 100"),
            ("bad_words", len(words) <= MAX_BAD_SEQUENCES, f"at most {MAX_BAD_SEQUENCES} token sequences"),
            ("bad_words", all(words), "at least one token in each"),
            ("bad_words", max(map(len, words), default=0) <= MAX_BAD_SEQUENCE, f"{MAX_BAD_SEQUENCE} tokens in each"),
            ("bad_words", sum(map(len, words)) <= MAX_BAD_TOKENS, f"at most {MAX_BAD_TOKENS} tokens in all"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("logprobs", counts[0] is None or 0 <= counts[0] <= MAX_LOGPROBS, f"0 .. {MAX_LOGPROBS}"),
            ("prompt_logprobs", counts[1] is None or 0 <= counts[1] <= MAX_LOGPROBS, f"0 .. {MAX_LOGPROBS}"),
        ):
            if not fine:  # NaN fails every comparison, so it is refused too
                raise RequestError(f"{name} out of range", where=name, found=getattr(self, name), expected=expected)

    @property
    def has_bias(self) -> bool:
        return bool(self.logit_bias or self.bad_words or self.min_tokens)

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as token ids. `stop` strings need an engine with a decoder."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_tokens: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    stop_visible: bool = False  # the text includes the stop string or stop token that ended it
    grammar: Grammar | None = None  # the answer is in its language, unless the length limit cuts it
    priority: int = 0  # lower values are served first
    #: Clients take turns, so that one with many requests does not keep the others waiting. It may be a secret.
    client: str = field(default="", repr=False)
    cache_salt: str = ""  # cached prefixes are shared among requests of the same salt only
    #: Of `Engine.choices`: serves its steps while it is the only request, so that no other one pays for the choice.
    policy: PolicyName | None = None


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
            max_batch or limits.max_batch, limits.max_context, limits.page_size, limits.prefill_chunk,
            limits.kv_memory, limits.prefix_cache,
        )  # fmt: skip

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def check(self, request: Request, vocab_size: int) -> None:
        """Raise RequestError if these limits or the vocabulary can never fit the request."""
        if not request.prompt:
            raise RequestError("the prompt is empty", where="prompt", expected="at least one token")
        total = len(request.prompt) + request.max_new_tokens
        if total > self.max_context:  # first: what follows reads the whole prompt
            raise RequestError(
                "the request does not fit the context", where="prompt + max_new_tokens",
                found=f"{len(request.prompt)} + {request.max_new_tokens} = {total}",
                expected=f"at most {self.max_context}",
                fix="shorten the prompt, lower max_new_tokens, or raise limits.max_context in the recipe",
            )  # fmt: skip
        if bad := [t for t in request.prompt if not 0 <= t < vocab_size]:
            raise RequestError(
                "prompt token outside the vocabulary", where="prompt", found=bad[0], expected=f"0 .. {vocab_size - 1}"
            )
        if request.max_new_tokens < 1:
            raise RequestError(
                "nothing to generate", where="max_new_tokens", found=request.max_new_tokens, expected="1 or more"
            )
        _check_tokens(request, vocab_size)
        _check_stops(request)


def _check_tokens(request: Request, vocab_size: int) -> None:
    """Raise RequestError for a token outside the vocabulary in a parameter, or too large a min_tokens."""
    sampling = request.sampling
    named = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "bad_words": [token for word in sampling.bad_words for token in word],
    }
    for where, tokens in named.items():
        for bad in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= bad < vocab_size:
                raise RequestError(
                    f"{where} has a token outside the vocabulary", where=where, found=bad,
                    expected=f"0 .. {vocab_size - 1}",
                )  # fmt: skip
    if sampling.min_tokens > request.max_new_tokens:
        raise RequestError(
            "min_tokens exceeds the answer's length", where="min_tokens", found=sampling.min_tokens,
            expected=f"at most {request.max_new_tokens}", fix="lower min_tokens or raise max_tokens",
        )  # fmt: skip


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
