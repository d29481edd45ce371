"""Bounds of one request, checked before work that grows with it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from d2sd.errors import ContextLengthExceeded, RequestError
from d2sd.runtime.request import Request as EngineRequest
from d2sd.serve.openai.settings import ServerSettings

#: Characters that a token of text has at most, on average: those of the vocabulary's longest token, within these
#: bounds. A tokenizer of words takes a word of any length for one unknown token, and some have tokens of 1,000 spaces.
_LEAST, _MOST = 16, 64
#: Most strings of `stop` and `bad_words` together; each bad word is encoded twice.
_WORDS = 1024
#: Most characters of several prompts, unless one context has more; the tokenizer needs about a second for them.
_PROMPTS = 1 << 20
#: Most values of a JSON body, besides a context of them, and most fields of the body itself. Checking the types of a
#: value that is wrong takes 12 us; that of prompts and tokens ends at the first one, so they may be more.
_VALUES, _FIELDS, _TOKENS = 1 << 14, 256, 1 << 17
_OF_TOKENS = ("prompt", "tokens")


class Bounds:
    """The bounds of one server."""

    def __init__(self, tokenizer: Any, max_context: int, settings: ServerSettings) -> None:
        longest = max(map(len, tokenizer.get_vocab()), default=0)
        self.tokens = max_context
        self.characters = max_context * min(max(longest, _LEAST), _MOST)
        self._settings = settings

    def check(self, body: BaseModel) -> None:
        """Raise RequestError for a body with more text, messages or words than any context has."""
        prompt, messages = getattr(body, "prompt", None), getattr(body, "messages", None) or ()
        self._check_prompts(prompt)
        parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
        if len(messages) + parts > self.tokens:
            raise self._too_long("messages", f"{len(messages)} messages, {parts} parts")
        said = [list(message.model_dump().values()) for message in messages]
        self._check_characters("messages", [*said, getattr(body, "tools", None)])
        stop = getattr(body, "stop", None)
        words = [*([stop] if isinstance(stop, str) else stop or ()), *(getattr(body, "bad_words", None) or ())]
        if len(words) > _WORDS:
            raise RequestError(
                "There are too many stop strings and bad words.",
                where="stop" if stop else "bad_words",
                found=len(words),
                expected=f"at most {_WORDS}",
            )
        self._check_characters("stop" if stop else "bad_words", words)
        if len(ids := getattr(body, "tokens", ())) > self.tokens:
            raise self._too_long("tokens", f"{len(ids):,} tokens")

    def check_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Raise RequestError for more log-probabilities than one response may have, or for a priority of its own."""
        prompts = sum(len(request.prompt) for request in requests if request.sampling.prompt_logprobs is not None)
        answers = sum(request.max_new_tokens for request in requests if request.sampling.logprobs is not None)
        most = max(self._settings.max_logprobs, self.tokens)  # one prompt with its answer always may
        if prompts + answers > most:
            raise RequestError(
                "The request asks for the log-probabilities of too many tokens.",
                where="prompt_logprobs" if prompts > answers else "logprobs",
                found=f"{prompts:,} of prompts and {answers:,} of {len(requests)} answers",
                expected=f"at most {most:,}",
                fix="send fewer prompts at once, a smaller n or a smaller {max_tokens}",
            )
        if requests[0].priority and not self._settings.priorities:
            raise RequestError(
                "This server takes requests in turns.",
                where="priority",
                found=requests[0].priority,
                expected=0,
                fix="leave it out, or ask for a server started with --allow-priority",
            )

    def _check_prompts(self, prompt: Any) -> None:
        """A prompt, or several, as text or as token ids."""
        if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt] if prompt else []
        if len(prompt) > self._settings.max_choices:
            raise RequestError(
                "There are too many prompts.",
                where="prompt",
                found=len(prompt),
                expected=f"at most {self._settings.max_choices}",
            )
        for item in prompt:
            if isinstance(item, str):
                self._check_characters("prompt", item)
            elif len(item) > self.tokens:
                raise self._too_long("prompt", f"{len(item):,} tokens")
        together, most = sum(len(item) for item in prompt if isinstance(item, str)), max(_PROMPTS, self.characters)
        if together > most:
            raise RequestError(
                "The prompts are too long together.",
                where="prompt",
                found=f"{together:,} characters in {len(prompt)} prompts",
                expected=f"at most {most:,}",
                fix="send fewer at once",
            )

    def _check_characters(self, where: str, value: Any) -> None:
        count = sum(map(len, _texts(value)))
        if count > self.characters:
            raise self._too_long(where, f"{count:,} characters")

    def _too_long(self, where: str, size: str) -> RequestError:
        if where in ("stop", "bad_words"):
            return RequestError("The strings are too long.", where=where, found=size, expected=f"{self.characters:,}")
        limit = f"This model's maximum context length is {self.tokens} tokens."
        return ContextLengthExceeded(
            f"{limit} However, you sent {size}, which are more.", where=where, fix="shorten it"
        )


def bounded_route(max_context: int) -> type[APIRoute]:
    """A route that refuses JSON bodies of very many values: reading them and checking their types takes seconds."""
    most, most_tokens = _VALUES + max_context, _TOKENS + max_context

    class Bounded(Request):
        async def json(self) -> Any:
            if least_values(await self.body(), most_tokens) <= most_tokens:
                value = await super().json()
                fields = value if isinstance(value, dict) else {"": value}
                rest = [field for name, field in fields.items() if name not in _OF_TOKENS]
                if len(fields) <= _FIELDS and not _has_more(rest, most) and not _has_more(value, most_tokens):
                    return value
            bounds = f"at most {most:,} ({most_tokens:,} of tokens), and {_FIELDS} fields"
            raise HTTPException(400, f"The body has too many values: {bounds}.")

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def bounded(request: Request) -> Response:
                return await handle(Bounded(request.scope, request.receive))

            return bounded

    return Route


def least_values(body: bytes, most: int) -> int:
    """Values that a JSON text has at least, by its commas outside strings; looks no closer than to tell `most`."""
    if (commas := body.count(b",")) <= most:
        return commas
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (strings := body.count(b'"') // 2) > 2 * most:  # names of fields included
        return strings // 2
    return sum(part.count(b",") for part in body.split(b'"')[::2])


def _has_more(value: Any, most: int) -> bool:
    """Whether a JSON value has more than `most` values in it. Looks at no more than that."""
    pending, count = [value], 0
    while pending:
        item = pending.pop()
        if isinstance(item, (dict, list)):
            count += len(item)
            if count > most:
                return True
            pending += item.values() if isinstance(item, dict) else item
    return False


def _texts(value: Any) -> list[str]:
    """All strings in a JSON value, names of fields included."""
    texts, pending = list[str](), [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return texts
