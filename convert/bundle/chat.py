"""Encodes messages with the target's chat template.

The template is untrusted Jinja from a checkpoint: transformers compiles it in a sandbox, and this module bounds its
rendering time and the length of its output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import thread_time
from types import FrameType, NoneType
from typing import Any

from d2sd.errors import RequestError

#: `[{"role": "user", "content": "..."}, ...]`
Messages = Sequence[Mapping[str, Any]]
#: Maximum CPU seconds of one rendering; templates of real models need milliseconds.
_SECONDS = 2.0
#: Maximum length of a rendered conversation, in characters; a context of a million tokens is shorter.
_MAX_LENGTH = 16 << 20
#: File name that Jinja gives a template compiled from a string.
_TEMPLATE = "<template>"


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids of `prompt` without a template. Raises `RequestError` for invalid Unicode."""
    _check_text(prompt, "prompt")
    ids: list[int] = tokenizer(prompt).input_ids
    return ids


def encode_chat(
    tokenizer: Any,
    messages: Messages,
    template: Mapping[str, Any],
    where: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return the token ids of a conversation in the chat template, up to the start of the assistant's answer.

    `tokenizer` is a transformers tokenizer, `template` holds extra variables of its chat template, and `where` names
    the template in errors. `tools` are the functions that the answer may call, in OpenAI's format. Raises
    `RequestError` for malformed messages and for a template that fails.
    """
    _check_messages(messages)
    try:
        with _deadline(_SECONDS):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False,
                tools=None if not tools else [dict(tool) for tool in tools], **template,
            )  # fmt: skip
    except (Exception, _TooSlow) as error:  # a template can raise anything, such as a RecursionError
        found = f"more than {_SECONDS:g} s" if isinstance(error, _TooSlow) else f"{type(error).__name__}: {error}"
        raise RequestError(
            "The chat template cannot be rendered.", where=where, found=found[:300],
            fix="correct the messages or the template, or pass the prompt without it (--raw)",
        ) from None  # fmt: skip
    if len(text) > _MAX_LENGTH:
        raise RequestError(
            "The chat template renders too much text.", where=where, found=f"{len(text):,} characters",
            expected=f"at most {_MAX_LENGTH:,}",
        )  # fmt: skip
    _check_text(text, where)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids  # the template writes them
    return ids


def _check_messages(messages: Messages) -> None:
    if not messages:
        raise RequestError("The conversation is empty.", where="messages", expected="at least one message")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        # content may be a list of parts, or null in a message with tool calls: some templates support both
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
            "The prompt is not Unicode text.", where=where, found=f"a lone surrogate at character {error.start}",
            fix="pass UTF-8",
        ) from None  # fmt: skip


class _TooSlow(BaseException):
    """A BaseException, so that no `except Exception` inside the rendering swallows it."""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `_TooSlow` in a template that runs for longer than `seconds` of this thread's CPU time.

    A trace function checks the clock on every line of the compiled template; unlike a signal, it works in any thread.
    """
    end = thread_time() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != _TEMPLATE:
            return None
        if thread_time() > end:
            raise _TooSlow
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
