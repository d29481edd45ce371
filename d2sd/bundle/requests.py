"""Makes the engine's requests for a bundle, for every face: of text, of conversations and of token ids alike."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from d2sd.bundle.chat import Messages, encode_prompt
from d2sd.bundle.turns import encode_turns
from d2sd.errors import RequestError
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SEEDS, SamplingParams
from d2sd.runtime.thought import Markers

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle

#: Seeds that are drawn are below this: they fit the signed integers of JSON readers.
_DRAWN_SEEDS = 2**63


def chat_request(
    bundle: Bundle, prompt: str | Messages, params: SamplingParams, max_new_tokens: int, *, raw: bool = False
) -> Request:
    """Make the request of a conversation or of one user turn; with `raw`, of a string without the chat template.

    Raises what `encode_input` and `make_request` do.
    """
    return make_request(bundle, encode_input(bundle, prompt, raw=raw), params, max_new_tokens)


def make_request(
    bundle: Bundle, prompt: Sequence[int], params: SamplingParams, max_new_tokens: int, **others: Any
) -> Request:
    """Make a request that ends at the target's stop tokens, and say the parameters' texts in tokens.

    `max_new_tokens` is its length where `params` give none; `others` are further fields of the request.
    """
    params = _with_bad_words(bundle, params)
    return Request(
        tuple(prompt),
        max_new_tokens if params.max_tokens is None else params.max_tokens,
        params,
        stop=tuple(params.stop),
        stop_tokens=frozenset(() if params.ignore_eos else bundle.stop_token_ids) | frozenset(params.stop_token_ids),
        stop_visible=params.include_stop_str_in_output,
        markers=None if params.thinking_token_budget is None else Markers.of(bundle.tokenizer),
        **others,
    )


def each_completion(request: Request) -> list[Request]:
    """The `n` requests that the sampling parameters of one ask for. Each has a seed, drawn if none is given."""
    params = request.sampling
    first = secrets.randbelow(_DRAWN_SEEDS) if params.seed is None else params.seed
    seeds = [(first + index) % SEEDS for index in range(params.n)]
    return [replace(request, sampling=params.with_seed(seed)) for seed in seeds]


def default_params(bundle: Bundle, **given: Any) -> SamplingParams:
    """Sampling parameters with the recipe's defaults for those that are not given; the seed has none."""
    defaults = bundle.recipe.sampling.model_dump(exclude={"seed", "max_new_tokens"})
    return SamplingParams(**defaults | given)


def encode_input(
    bundle: Bundle,
    prompt: str | tuple[int, ...] | Messages,
    *,
    raw: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Sequence[int]:
    """Token ids of a conversation, `[{"role": ..., "content": ...}, ...]`, of one user turn, or those given as a tuple.

    The first two are put into the target's chat template, with `tools` in OpenAI's format. With `raw`, or where the
    target has no template, a string is encoded without one. Raises `RequestError` for malformed messages and for a
    template that cannot be rendered.
    """
    tokenizer = bundle.tokenizer
    if isinstance(prompt, tuple):
        return prompt
    if isinstance(prompt, str) and (raw or not tokenizer.chat_template):
        return encode_prompt(tokenizer, prompt)
    if raw or not tokenizer.chat_template:
        raise RequestError(
            "A conversation needs a chat template.",
            where=bundle.path / "target",
            found="raw" if raw else "none in tokenizer_config.json",
            fix="pass one string, as LLM.generate() takes it",
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    where = f"{bundle.path / 'target'}: chat_template"
    return encode_turns(tokenizer, messages, bundle.recipe.target.template, where, tools)


def encode_bad_words(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word as vLLM encodes it: alone, and after a space where that changes the first token only."""
    token_ids: list[list[int]] = []
    alone, behind = (
        tokenizer([space + word.lstrip() for word in words], add_special_tokens=False).input_ids for space in ("", " ")
    )
    for word, plain, spaced in zip(words, alone, behind, strict=True):
        if not plain:
            raise RequestError("The tokenizer encodes a bad word as nothing.", where="bad_words", found=word)
        token_ids.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            token_ids.append(spaced)
    return token_ids


def _with_bad_words(bundle: Bundle, params: SamplingParams) -> SamplingParams:
    """The parameters with the bad words as tokens."""
    if not params.bad_words:
        return params
    banned = (*params.bad_words_token_ids, *encode_bad_words(bundle.tokenizer, params.bad_words))
    try:
        return replace(params, bad_words=(), bad_words_token_ids=banned)
    except RequestError as error:  # the caller knows the words alone
        raise RequestError(
            "The bad words have too many tokens.", where="bad_words", found=params.bad_words, expected=error.expected
        ) from None
