"""Renders messages with the target's chat template.

The template is untrusted Jinja from a checkpoint: `template_process.py` renders it within bounds of time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from d2sd.bundle.template_process import PROCESS, TemplateError, TooLong
from d2sd.errors import RequestError

#: `[{"role": "user", "content": "..."}, ...]`
Messages = Sequence[Mapping[str, Any]]


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids of `prompt` without a template. Raises `RequestError` for invalid Unicode."""
    _check_text(prompt, "prompt")
    ids: list[int] = tokenizer(prompt).input_ids
    return ids


def render_chat(
    tokenizer: Any,
    messages: Messages,
    template: Mapping[str, Any],
    where: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    generation_prompt: bool = True,
) -> str:
    """The text of a conversation, equal to that of the tokenizer's own `apply_chat_template`.

    `tokenizer` is a transformers tokenizer, `template` holds extra variables of its chat template, and `where` names
    the template in errors. `tools` are the functions that the answer may call, in OpenAI's format. With
    `generation_prompt` the text ends with the start of the assistant's answer. Raises `RequestError` for malformed
    messages and for a template that fails.
    """
    _check_messages(messages)
    values = {
        "messages": [dict(message) for message in messages],
        "tools": [dict(tool) for tool in tools] if tools else None,
        "documents": None,
        "add_generation_prompt": generation_prompt,
        **_special_tokens(tokenizer),
        **template,
    }
    try:
        text = PROCESS.render(tokenizer.get_chat_template(tools=tools or None), values)
    except TooLong as error:
        raise RequestError(
            "The chat template renders too much text.",
            where=where,
            found=f"{error} characters",
            expected=f"at most {PROCESS.limits.length:,}",
        ) from None
    except (TemplateError, ValueError, OSError) as error:  # ValueError: several templates, and none is the default
        raise RequestError(
            "The chat template cannot be rendered.",
            where=where,
            found=str(error)[:300],
            fix="correct the messages or the template, or pass the prompt without it: {untemplated}",
        ) from None
    _check_text(text, where)
    return text


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Special tokens by name, which templates write: text, or lists of text."""
    tokens = tokenizer.special_tokens_map.items()
    return {name: [*map(str, value)] if isinstance(value, list) else str(value) for name, value in tokens}


def _check_messages(messages: Messages) -> None:
    if not messages:
        raise RequestError("The conversation is empty.", where="messages", expected="at least one message")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        # content may be null in a message with tool calls
        known = isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
        if not known or not isinstance(message["content"], (str, list, NoneType)):
            expected = '{"role": "user", "content": "..."}'
            raise RequestError("This is not a chat message.", where=where, found=message, expected=expected)
        for key, value in message.items():
            if isinstance(value, str):
                _check_text(value, f"{where}.{key}")


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            "The prompt is not Unicode text.",
            where=where,
            found=f"a lone surrogate at character {error.start}",
            fix="pass UTF-8",
        ) from None
