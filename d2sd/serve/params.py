"""The public sampling parameters: vLLM's names, no torch."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

from d2sd.errors import RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.runtime.request import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from d2sd.runtime.request import SamplingParams as TokenSampling
from d2sd.typed import typed

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.request import Request

#: Seeds are below this; the i-th of n completions has the seed (seed + i) modulo it.
SEEDS = 2**64
#: Completions of a prompt.
MAX_COMPLETIONS = 128
#: Stop tokens of a request besides the target's own, which the engine's bound leaves room for.
MAX_STOP_TOKEN_IDS = 4_096
#: Strings that a request bans, and their characters in all, checked before they are tokenized.
MAX_BAD_WORDS, MAX_BAD_CHARACTERS = 1_024, 32_768
#: Seeds that are drawn are below this: they fit the signed integers of JSON readers.
_DRAWN_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a completion is sampled and when it ends.

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
        structured_outputs: the form of the completion: JSON, a regular expression, a choice or a grammar.

    Penalties, logit_bias, bad_words and min_tokens apply to greedy decoding too. Numbers may be numpy's. Raises
    `RequestError` naming the field that is out of range or of another type.
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
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            object.__setattr__(self, name, typed(getattr(self, name), kind, name))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for name, fine, expected in (
            ("seed", self.seed is None or 0 <= self.seed < SEEDS, "0 .. 2^64 - 1, or None"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            ("n", 1 <= self.n <= MAX_COMPLETIONS, f"1 .. {MAX_COMPLETIONS}"),
            ("stop", _all_words(self.stop), "non-empty strings of Unicode"),
            ("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"),
            (
                "stop",
                max(_lengths(self.stop), default=0) <= MAX_STOP_LENGTH,
                f"{MAX_STOP_LENGTH} characters in each",
            ),
            ("stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS} tokens"),
            ("bad_words", _all_words(self.bad_words), "non-empty strings of Unicode"),
            ("bad_words", len(self.bad_words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} strings"),
            (
                "bad_words",
                sum(_lengths(self.bad_words)) <= MAX_BAD_CHARACTERS,
                f"{MAX_BAD_CHARACTERS} characters",
            ),
        ):
            if not fine:
                raise RequestError(f"{name} out of range", where=name, found=getattr(self, name), expected=expected)
        self.for_tokens(0)

    def for_tokens(self, seed: int, bad_words: Sequence[Sequence[int]] = ()) -> TokenSampling:
        """These parameters as the engine takes them, with bad words as token ids. Raises `RequestError`."""
        return TokenSampling(
            self.temperature, self.top_p, max(self.top_k, 0) if self.top_k >= -1 else self.top_k, seed, self.min_p,
            self.repetition_penalty, self.presence_penalty, self.frequency_penalty, tuple(self.logit_bias.items()),
            tuple(map(tuple, bad_words)), self.min_tokens, self.logprobs, self.prompt_logprobs,
        )  # fmt: skip

    def seeds(self) -> list[int]:
        """The seed of each of the `n` completions; a random start in place of None."""
        first = secrets.randbelow(_DRAWN_SEEDS) if self.seed is None else self.seed
        return [(first + index) % SEEDS for index in range(self.n)]


@cache
def _kinds() -> dict[str, Any]:
    """The annotated type of each field."""
    return get_type_hints(SamplingParams)


def with_params(bundle: Bundle, request: Request, params: SamplingParams) -> list[Request]:
    """`n` requests like `request`, whose stop tokens are the target's, with these parameters.

    Its length and its grammar are kept.
    """
    bad_words = encode_bad_words(bundle.tokenizer, params.bad_words)
    request = replace(
        request,
        stop=tuple(params.stop),
        stop_tokens=(frozenset() if params.ignore_eos else request.stop_tokens) | set(params.stop_token_ids),
        stop_visible=params.include_stop_str_in_output,
    )
    sampling = params.for_tokens(0, bad_words)
    return [replace(request, sampling=replace(sampling, seed=seed)) for seed in params.seeds()]


def encode_bad_words(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word as vLLM encodes it: alone, and after a space where that changes the first token only."""
    found: list[list[int]] = []
    if not words:
        return found
    alone, behind = (
        tokenizer([space + word.lstrip() for word in words], add_special_tokens=False).input_ids for space in ("", " ")
    )
    for word, plain, spaced in zip(words, alone, behind, strict=True):
        if not plain:
            raise RequestError("The tokenizer encodes a bad word as nothing.", where="bad_words", found=word)
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return found


def _all_words(words: Sequence[str]) -> bool:
    try:  # the tokenizer takes no half of a surrogate pair
        return all(isinstance(word, str) and word.encode() for word in words)
    except UnicodeEncodeError:
        return False


def _lengths(words: Sequence[str]) -> list[int]:
    return [len(word) for word in words if isinstance(word, str)]
