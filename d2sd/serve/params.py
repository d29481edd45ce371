"""Requests of the engine from sampling parameters: what they say as text becomes tokens, and n becomes n requests."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from d2sd.errors import RequestError
from d2sd.runtime.sampling_params import SEEDS

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.request import Request

#: Seeds that are drawn are below this: they fit the signed integers of JSON readers.
_DRAWN_SEEDS = 2**63


def each_completion(bundle: Bundle, request: Request) -> list[Request]:
    """The `n` requests that the sampling parameters of `request` ask for; its stop tokens are the target's.

    Each has a seed, drawn if none is given. Length and grammar are kept.
    """
    params = request.sampling
    if params.bad_words:
        banned = (*params.bad_words_token_ids, *encode_bad_words(bundle.tokenizer, params.bad_words))
        try:
            params = replace(params, bad_words=(), bad_words_token_ids=banned)
        except RequestError as error:  # the caller knows the words alone
            raise RequestError(
                "The bad words have too many tokens.",
                where="bad_words",
                found=params.bad_words,
                expected=error.expected,
            ) from None
    request = replace(
        request,
        stop=tuple(params.stop),
        stop_tokens=(frozenset() if params.ignore_eos else request.stop_tokens) | set(params.stop_token_ids),
        stop_visible=params.include_stop_str_in_output,
    )
    first = secrets.randbelow(_DRAWN_SEEDS) if params.seed is None else params.seed
    seeds = [(first + index) % SEEDS for index in range(params.n)]
    return [replace(request, sampling=params.with_seed(seed)) for seed in seeds]


def encode_bad_words(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word as vLLM encodes it: alone, and after a space where that changes the first token only."""
    token_ids: list[list[int]] = []
    if not words:
        return token_ids
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
