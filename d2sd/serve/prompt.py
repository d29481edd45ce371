"""Text and messages to requests: tokenization, the chat template, the recipe's sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from d2sd.errors import RequestError
from d2sd.serve.params import SamplingParams

if TYPE_CHECKING:
    from d2sd.convert.bundle.load import Bundle
    from d2sd.runtime.request import Request

#: One turn of a conversation: {"role": ..., "content": ...}.
Message = Mapping[str, str]


def make_request(bundle: Bundle, prompt: str | Sequence[Message], sampling: SamplingParams | None) -> Request:
    """A request for a plain prompt, or for the next turn of a conversation. Raises `RequestError`."""
    from d2sd.runtime.request import Request

    defaults = bundle.recipe.sampling
    if sampling is None:
        sampling = SamplingParams(defaults.temperature, defaults.top_p, defaults.top_k, defaults.seed)
    ids = bundle.tokenizer(prompt).input_ids if isinstance(prompt, str) else _apply_template(bundle, prompt)
    length = sampling.max_tokens or defaults.max_new_tokens
    return Request(tuple(ids), length, sampling, frozenset(bundle.stop_token_ids), tuple(sampling.stop))


def _apply_template(bundle: Bundle, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, ending with the header of the assistant's turn."""
    from jinja2 import TemplateError

    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise RequestError(
                "Not a chat message.", where=f"messages[{index}]", found=message,
                expected='{"role": "user", "content": "..."}',
            )  # fmt: skip
    if not messages:
        raise RequestError("The conversation is empty.", where="messages", expected="at least one message")
    tokenizer = bundle.tokenizer
    if not tokenizer.chat_template:
        raise RequestError(
            "The target has no chat template.",
            where=bundle.path / "target",
            fix="pass text to generate()",
        )
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **bundle.recipe.target.template,
        )
    except TemplateError as error:
        raise RequestError(
            "The target's chat template refuses the conversation.", where="messages", found=error
        ) from None
    return ids
