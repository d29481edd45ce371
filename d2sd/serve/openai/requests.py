"""Turns request bodies into requests of the engine. Runs in the tokenizer's thread: it renders and encodes text."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from d2sd.convert.bundle.chat import encode_chat, encode_prompt
from d2sd.errors import RequestError
from d2sd.runtime.request import Request
from d2sd.serve.openai.protocol import ChatBody, CompletionBody, GenerationBody, Message, TokenizeBody, conversation
from d2sd.serve.params import SamplingParams, with_params

if TYPE_CHECKING:
    from d2sd.convert.bundle.load import Bundle
    from d2sd.serve.openai.settings import ServerSettings

#: Fields that bodies and `SamplingParams` share; those left out take the defaults of the bundle's recipe.
_SHARED = {field.name for field in fields(SamplingParams)} & set(GenerationBody.model_fields) - {"logit_bias"}


def chat_requests(bundle: Bundle, body: ChatBody, settings: ServerSettings) -> list[Request]:
    """The n requests of a conversation."""
    if body.max_completion_tokens is not None and body.max_tokens is not None:
        raise RequestError("Give max_tokens or max_completion_tokens, not both.", where="max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs.", where="top_logprobs", fix="set logprobs to true")
    given = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    return _requests(bundle, body, [encode_messages(bundle, body.messages)], given, settings)


def completion_requests(bundle: Bundle, body: CompletionBody, settings: ServerSettings) -> list[Request]:
    """n requests for each prompt, in the order of the prompts."""
    prompts: list[Any] = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    encoded = [encode_prompt(bundle.tokenizer, p) if isinstance(p, str) else p for p in prompts]
    return _requests(bundle, body, encoded, {"logprobs": body.logprobs}, settings)


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
    bundle: Bundle, body: GenerationBody, prompts: list[list[int]], given: dict[str, Any], settings: ServerSettings
) -> list[Request]:
    """The requests of `prompts`; `given` are parameters that chats and completions spell differently."""
    count = body.n or 1
    if not 0 < len(prompts) * count <= settings.max_choices:
        raise RequestError(
            "The number of answers is out of range.", where="n", found=f"{len(prompts)} prompts, n = {count}",
            expected=f"1 .. {settings.max_choices} answers in all",
        )  # fmt: skip
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("A stream does not report prompt_logprobs.", where="prompt_logprobs", fix="do not stream")
    defaults = bundle.recipe.sampling
    values = {"temperature": defaults.temperature, "top_p": defaults.top_p, "top_k": defaults.top_k} | given
    values |= {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    params = SamplingParams(**values)
    made = []
    for prompt in prompts:
        room = max(1, bundle.recipe.limits.max_context - len(prompt))
        length = min(defaults.max_new_tokens, room) if params.max_tokens is None else params.max_tokens
        request = Request(tuple(prompt), length, stop_tokens=frozenset(bundle.stop_token_ids))
        made += with_params(bundle, request, params)
    return made
