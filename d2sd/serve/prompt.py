"""Text and messages to requests, with the recipe's sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from d2sd.convert.bundle.serving import chat_request
from d2sd.serve.params import SamplingParams

if TYPE_CHECKING:
    from d2sd.convert.bundle.load import Bundle
    from d2sd.runtime.request import Request

#: One turn of a conversation: {"role": ..., "content": ...}.
Message = Mapping[str, str]


def make_request(bundle: Bundle, prompt: str | Sequence[Message], sampling: SamplingParams | None) -> Request:
    """A request for a plain prompt, or for the next turn of a conversation. Raises `RequestError`."""
    defaults = bundle.recipe.sampling
    if sampling is None:
        sampling = SamplingParams(defaults.temperature, defaults.top_p, defaults.top_k, defaults.seed)
    length = sampling.max_tokens or defaults.max_new_tokens
    plain = isinstance(prompt, str)  # generate() continues text as it is
    return chat_request(bundle, prompt, sampling, length, raw=plain, stop=tuple(sampling.stop))
