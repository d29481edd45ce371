"""Sampling parameters and their bounds: plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_type_hints

from d2sd.errors import RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.typed import typed

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
#: Stop tokens of a request, the target's own included; without them.
MAX_STOP_TOKENS, MAX_STOP_TOKEN_IDS = 8_192, 4_096
#: Strings that a request bans, and their characters in all, checked before they are tokenized.
MAX_BAD_WORDS, MAX_BAD_CHARACTERS = 1_024, 32_768
#: Completions of a prompt.
MAX_COMPLETIONS = 128
#: Seeds are below this; the i-th of n completions has the seed (seed + i) modulo it.
SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a completion is sampled and when it ends, with vLLM's names.

    Attributes:
        temperature: 0 is greedy decoding.
        top_p: probability mass kept by nucleus sampling; 1 keeps all of it.
        top_k: number of tokens kept; 0 or -1 keeps all of them.
        seed: the same seed gives the same text under every policy and batch size; None draws one, which the completion
            reports.
        max_tokens: most tokens generated; None takes `sampling.max_new_tokens` of the bundle's recipe.
        stop: strings that end the completion, up to 64 of 1,024 characters; they are not part of its text.
        n: completions of the prompt; the i-th has the seed (seed + i) modulo 2^64.
        min_p: least probability of a token, as a share of the likeliest token's; 0 keeps all tokens.
        repetition_penalty: above 1, tokens of prompt and completion become less likely; 1 is off; 0.01 .. 100.
        presence_penalty: subtracted from the logits of tokens in the completion, -2 .. 2.
        frequency_penalty: subtracted once for each time that a token is in the completion, -2 .. 2.
        logit_bias: token id -> number added to its logit, -100 .. 100; up to 32,768 tokens.
        bad_words: strings whose token sequences are not generated, up to 1,024 strings of 32,768 characters in all.
        min_tokens: tokens before which neither a stop string nor a stop token ends the completion.
        stop_token_ids: tokens that end the completion, besides the target's own; up to 4,096.
        ignore_eos: whether to generate on after the target's stop tokens.
        include_stop_str_in_output: whether the stop string or stop token is part of the text.
        logprobs: report each token's log-probability and those of this many likeliest tokens, 0 .. 20.
        prompt_logprobs: the same for the prompt's tokens.
        bad_words_token_ids: token sequences that are not generated, begun in the prompt or not; `each_completion` adds
            those of `bad_words`.
        structured_outputs: the form of the completion: JSON, a regular expression, a choice or a grammar.

    First the logits are changed, for greedy requests too: logit_bias, bad_words, min_tokens, then the penalties. Then
    come temperature, min_p, top_k and top_p, each on the probabilities that the one before it left.

    Numbers may be numpy's. Raises `RequestError` naming the field that is out of range or of another type.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    n: int = 1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            object.__setattr__(self, name, typed(getattr(self, name), kind, name))
        for name, value in (
            ("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)),
            ("top_k", 0 if self.top_k == -1 else self.top_k),
            ("bad_words", tuple(self.bad_words)),
            ("bad_words_token_ids", tuple(map(tuple, self.bad_words_token_ids))),
            ("stop_token_ids", tuple(self.stop_token_ids)),
            ("logit_bias", dict(self.logit_bias)),
        ):
            object.__setattr__(self, name, value)
        for name, fine, expected in (*self._number_checks(), *self._list_checks()):
            if not fine:  # NaN fails every comparison, so it is refused too
                raise RequestError(f"{name} out of range", where=name, found=getattr(self, name), expected=expected)

    def _number_checks(self) -> Iterator[tuple[str, bool, str]]:
        """Field, whether it is in range, and the range."""
        yield "temperature", 0 <= self.temperature < 100, "0 (greedy) or more, below 100"
        yield "top_p", 0 < self.top_p <= 1, "above 0, at most 1"
        yield "top_k", 0 <= self.top_k < 2**31, "0 or -1 (off) .. 2^31 - 1"
        yield "seed", self.seed is None or 0 <= self.seed < SEEDS, "0 .. 2^64 - 1, or None"
        yield "max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more"
        yield "n", 1 <= self.n <= MAX_COMPLETIONS, f"1 .. {MAX_COMPLETIONS}"
        yield "min_p", 0 <= self.min_p <= 1, "0 (off) .. 1"
        least, most = PENALTIES
        yield "repetition_penalty", least <= self.repetition_penalty <= most, "0.01 .. 100; 1 is off"
        yield "presence_penalty", -2 <= self.presence_penalty <= 2, "-2 .. 2"
        yield "frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 .. 2"
        yield "min_tokens", self.min_tokens >= 0, "0 or more"
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            yield name, count is None or 0 <= count <= MAX_LOGPROBS, f"0 .. {MAX_LOGPROBS}"

    def _list_checks(self) -> Iterator[tuple[str, bool, str]]:
        """Field, whether it has as many entries and as long ones as an engine takes, and the bound."""
        stop, words, biases = self.stop, self.bad_words, self.logit_bias
        yield "stop", _all_words(stop), "non-empty strings of Unicode"
        yield "stop", len(stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"
        yield "stop", max(map(len, stop), default=0) <= MAX_STOP_LENGTH, f"{MAX_STOP_LENGTH} characters in each"
        yield "stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS} tokens"
        yield "bad_words", _all_words(words), "non-empty strings of Unicode"
        yield "bad_words", len(words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} strings"
        yield "bad_words", sum(map(len, words)) <= MAX_BAD_CHARACTERS, f"{MAX_BAD_CHARACTERS} characters"
        yield "logit_bias", len(biases) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} biases"
        yield "logit_bias", all(-100 <= bias <= 100 for bias in biases.values()), "biases of -100 .. 100"
        name, banned = "bad_words_token_ids", self.bad_words_token_ids
        yield name, len(banned) <= MAX_BAD_SEQUENCES, f"at most {MAX_BAD_SEQUENCES} token sequences"
        yield name, all(banned), "at least one token in each"
        yield name, max(map(len, banned), default=0) <= MAX_BAD_SEQUENCE, f"{MAX_BAD_SEQUENCE} tokens in each"
        yield name, sum(map(len, banned)) <= MAX_BAD_TOKENS, f"at most {MAX_BAD_TOKENS} tokens in all"

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with another seed, which is not checked again."""
        params = copy(self)
        object.__setattr__(params, "seed", seed)
        return params

    @property
    def has_bias(self) -> bool:
        return bool(self.logit_bias or self.bad_words_token_ids or self.min_tokens)

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@cache
def _kinds() -> dict[str, Any]:
    """The annotated type of each field."""
    return get_type_hints(SamplingParams)


def _all_words(words: Sequence[str]) -> bool:
    try:  # the tokenizer takes no half of a surrogate pair
        return all(word.encode() for word in words)
    except UnicodeEncodeError:
        return False
