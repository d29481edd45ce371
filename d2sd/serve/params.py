"""The public sampling parameters: vLLM's names, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from d2sd.errors import RequestError
from d2sd.runtime.request import SamplingParams as TokenSampling


@dataclass(frozen=True, slots=True)
class SamplingParams(TokenSampling):
    """How a completion is sampled and when it ends.

    Attributes:
        temperature: 0 is greedy decoding.
        top_p: probability mass kept by nucleus sampling; 1 keeps all of it.
        top_k: number of tokens kept; 0 keeps all of them.
        seed: the same seed gives the same text under every policy and batch size.
        max_tokens: most tokens generated; None takes `sampling.max_new_tokens` of the bundle's recipe.
        stop: strings that end the completion; they are not part of its text.

    Raises `RequestError` naming the field that is out of range.
    """

    max_tokens: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()

    def __post_init__(self) -> None:
        TokenSampling.__post_init__(self)  # super() does not work in a dataclass with slots
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(
                "max_tokens out of range", where="max_tokens", found=self.max_tokens, expected="1 or more"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError("A stop string is empty.", where="stop", found=stop, expected="non-empty strings")
        object.__setattr__(self, "stop", stop)
