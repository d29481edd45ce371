"""Sampling parameters and their bounds: plain data, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from d2sd.errors import RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.typed import typed

#: Most alternatives that logprobs report for a token, as in vLLM and in OpenAI's API.
MAX_LOGPROBS = 20

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


class Bound(NamedTuple):
    """A bound of a field, written with its type; None is always within."""

    holds: Callable[[Any], bool]
    expected: str


def _between(least: float, most: float) -> Bound:
    return Bound(lambda value: least <= value <= most, f"{least} .. {most}")


def _at_most(count: int, what: str) -> Bound:
    return Bound(lambda entries: len(entries) <= count, f"at most {count} {what}")


def _are_words(words: Sequence[str]) -> bool:
    try:  # the tokenizer takes no half of a surrogate pair
        return all(word.encode() for word in words)
    except UnicodeEncodeError:
        return False


_WORDS = Bound(_are_words, "non-empty strings of Unicode")


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
        thinking_token_budget: tokens of a thought behind its beginning, where its end is forced; -1 or None: no limit.
        stop_token_ids: tokens that end the completion, besides the target's own; up to 4,096.
        ignore_eos: whether to generate on after the target's stop tokens.
        include_stop_str_in_output: whether the stop string or stop token is part of the text.
        logprobs: report each token's log-probability and those of this many likeliest tokens, 0 .. 20.
        prompt_logprobs: the same for the prompt's tokens.
        bad_words_token_ids: token sequences that are not generated, begun in the prompt or not; `each_completion` adds
            those of `bad_words`.
        structured_outputs: the form of the completion: JSON, a regular expression, a choice or a grammar.
        speculative: whether its steps verify drafts, or `{"policy": ...}`, by which tree policy; the text is the same.

    First the logits are changed, for greedy requests too: logit_bias, bad_words, min_tokens and thinking_token_budget,
    then the penalties. Then come temperature, min_p, top_k and top_p, each on the probabilities that the one before it
    left.

    Numbers may be numpy's. Raises `RequestError` naming the field that is out of range or of another type.
    """

    temperature: Annotated[float, Bound(lambda t: 0 <= t < 100, "0 (greedy) or more, below 100")] = 0.0
    top_p: Annotated[float, Bound(lambda p: 0 < p <= 1, "above 0, at most 1")] = 1.0
    top_k: Annotated[int, Bound(lambda k: 0 <= k < 2**31, "0 or -1 (off) .. 2^31 - 1")] = 0
    seed: Annotated[int | None, Bound(lambda seed: 0 <= seed < SEEDS, "0 .. 2^64 - 1, or None")] = None
    max_tokens: Annotated[int | None, Bound(lambda count: count >= 1, "1 or more")] = None
    stop: Annotated[
        str | Sequence[str],
        _WORDS,
        _at_most(MAX_STOP_STRINGS, "strings"),
        Bound(lambda stop: all(len(one) <= MAX_STOP_LENGTH for one in stop), f"{MAX_STOP_LENGTH} characters in each"),
    ] = ()
    n: Annotated[int, _between(1, MAX_COMPLETIONS)] = 1
    min_p: Annotated[float, Bound(lambda p: 0 <= p <= 1, "0 (off) .. 1")] = 0.0
    # It multiplies a logit by up to 100, the lowest temperature by up to 1e5 more, so logits up to 1e31 stay finite in
    # fp32, which ends at 3e38.
    repetition_penalty: Annotated[float, Bound(lambda p: 0.01 <= p <= 100, "0.01 .. 100; 1 is off")] = 1.0
    presence_penalty: Annotated[float, _between(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, _between(-2, 2)] = 0.0
    logit_bias: Annotated[
        Mapping[int, float],
        _at_most(MAX_LOGIT_BIAS, "biases"),
        Bound(lambda biases: all(-100 <= bias <= 100 for bias in biases.values()), "biases of -100 .. 100"),
    ] = field(default_factory=dict, hash=False)
    bad_words: Annotated[
        Sequence[str],
        _WORDS,
        _at_most(MAX_BAD_WORDS, "strings"),
        Bound(lambda words: sum(map(len, words)) <= MAX_BAD_CHARACTERS, f"{MAX_BAD_CHARACTERS} characters"),
    ] = ()
    min_tokens: Annotated[int, Bound(lambda count: count >= 0, "0 or more")] = 0
    thinking_token_budget: Annotated[int | None, Bound(lambda count: count >= 0, "0 or more; -1 or None: off")] = None
    stop_token_ids: Annotated[Sequence[int], _at_most(MAX_STOP_TOKEN_IDS, "tokens")] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: Annotated[int | None, _between(0, MAX_LOGPROBS)] = None
    prompt_logprobs: Annotated[int | None, _between(0, MAX_LOGPROBS)] = None
    bad_words_token_ids: Annotated[
        Sequence[Sequence[int]],
        _at_most(MAX_BAD_SEQUENCES, "token sequences"),
        Bound(all, "at least one token in each"),
        Bound(lambda banned: all(len(one) <= MAX_BAD_SEQUENCE for one in banned), f"{MAX_BAD_SEQUENCE} tokens in each"),
        Bound(lambda banned: sum(map(len, banned)) <= MAX_BAD_TOKENS, f"at most {MAX_BAD_TOKENS} tokens in all"),
    ] = ()
    structured_outputs: StructuredOutputsParams | None = None
    speculative: Annotated[
        bool | Mapping[Literal["policy"], str], Bound(lambda asked: asked != {}, 'True, False or {"policy": ...}')
    ] = field(default=True, hash=False)

    def __post_init__(self) -> None:
        for name, kind in hints().items():
            object.__setattr__(self, name, typed(getattr(self, name), kind, name))
        for name, value in (
            ("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)),
            ("top_k", 0 if self.top_k == -1 else self.top_k),
            ("thinking_token_budget", None if self.thinking_token_budget == -1 else self.thinking_token_budget),
            ("bad_words", tuple(self.bad_words)),
            ("bad_words_token_ids", tuple(map(tuple, self.bad_words_token_ids))),
            ("stop_token_ids", tuple(self.stop_token_ids)),
            ("logit_bias", dict(self.logit_bias)),
        ):
            object.__setattr__(self, name, value)
        for name, kind in hints().items():
            value = getattr(self, name)
            for bound in getattr(kind, "__metadata__", ()) if value is not None else ():
                if not bound.holds(value):  # NaN fails every comparison, so it is refused too
                    raise RequestError(f"{name} out of range", where=name, found=value, expected=bound.expected)

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with another seed, which is not checked again."""
        params = copy(self)
        object.__setattr__(params, "seed", seed)
        return params

    @property
    def has_bias(self) -> bool:
        budget = self.thinking_token_budget is not None
        return bool(self.logit_bias or self.bad_words_token_ids or self.min_tokens or budget)

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@cache
def hints() -> dict[str, Any]:
    """The annotated type of each field, with its bounds."""
    return get_type_hints(SamplingParams, globals(), include_extras=True)
