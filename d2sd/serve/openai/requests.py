"""Turns request bodies into requests of the engine. Runs in the tokenizer's thread: it renders and encodes text."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from d2sd.convert.bundle.chat import encode_chat, encode_prompt
from d2sd.errors import RequestError
from d2sd.runtime.request import Request
from d2sd.serve.openai.protocol import ChatBody, CompletionBody, GenerationBody, Message, TokenizeBody, conversation
from d2sd.serve.params import SamplingParams

if TYPE_CHECKING:
    from d2sd.convert.bundle.load import Bundle
    from d2sd.serve.openai.settings import ServerSettings

#: Fields that a body and `SamplingParams` share.
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop")


def chat_requests(bundle: Bundle, body: ChatBody, settings: ServerSettings) -> list[Request]:
    """The n requests of a conversation."""
    if body.max_completion_tokens is not None:
        if body.max_tokens is not None:
            raise RequestError("Give max_tokens or max_completion_tokens, not both.", where="max_completion_tokens")
        body = body.model_copy(update={"max_tokens": body.max_completion_tokens})
    return _requests(bundle, body, [tuple(encode_messages(bundle, body.messages))], settings)


def completion_requests(bundle: Bundle, body: CompletionBody, settings: ServerSettings) -> list[Request]:
    """n requests for each prompt, in the order of the prompts."""
    prompts: list[Any] = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    encoded = [tuple(encode_prompt(bundle.tokenizer, p) if isinstance(p, str) else p) for p in prompts]
    return _requests(bundle, body, encoded, settings)


def encode(bundle: Bundle, body: TokenizeBody) -> list[int]:
    """Token ids of a prompt or a conversation."""
    if body.prompt is not None:
        return encode_prompt(bundle.tokenizer, body.prompt)
    return encode_messages(bundle, body.messages or [])


def encode_messages(bundle: Bundle, messages: list[Message]) -> list[int]:
    """Token ids of a conversation in the target's chat template."""
    if not bundle.tokenizer.chat_template:
        raise RequestError("This model has no chat template.", where="messages", fix="use /v1/completions")
    where = f"{bundle.recipe.name}: chat_template"
    return encode_chat(bundle.tokenizer, conversation(messages), bundle.recipe.target.template, where)


def _requests(
    bundle: Bundle, body: GenerationBody, prompts: list[tuple[int, ...]], settings: ServerSettings
) -> list[Request]:
    count = body.n or 1
    if not 0 < len(prompts) * count <= settings.max_choices:
        raise RequestError(
            "The number of answers is out of range.", where="n", found=f"{len(prompts)} prompts, n = {count}",
            expected=f"1 .. {settings.max_choices} answers in all",
        )  # fmt: skip
    return [
        _request(bundle, prompt, body, choice, bundle.recipe.limits.max_context)
        for prompt in prompts
        for choice in range(count)
    ]


def _request(bundle: Bundle, prompt: tuple[int, ...], body: GenerationBody, choice: int, context: int) -> Request:
    """The request of one answer; fields that the body leaves out take the defaults of the bundle's recipe."""
    defaults = bundle.recipe.sampling
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    given.setdefault("seed", secrets.randbits(63))
    given.setdefault("max_tokens", max(1, min(defaults.max_new_tokens, context - len(prompt))))
    params = SamplingParams(
        **{"temperature": defaults.temperature, "top_p": defaults.top_p, "top_k": defaults.top_k, **given}
    )
    assert params.max_tokens is not None
    params = replace(params, seed=(params.seed + choice) % 2**64)
    return Request(prompt, params.max_tokens, params, frozenset(bundle.stop_token_ids), tuple(params.stop))
