"""Answers as OpenAI's objects: whole, and as the chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from d2sd.bundle.turns import TOOL_CALL
from d2sd.serve.completion import by_token
from d2sd.serve.openai.protocol import ChatBody, CompletionBody, GenerationBody
from d2sd.serve.openai.responses import EventStream
from d2sd.serve.reasoning import Thought, unfinished
from d2sd.serve.tools import ToolCall, parse_tool_calls

if TYPE_CHECKING:
    from d2sd.runtime.sequence import Output, TokenLogprobs
    from d2sd.serve.openai.generation import Choice, Generation

#: Reported for a token that is impossible: JSON has no infinity.
_LEAST = -9999.0


class Format(ABC):
    """The objects of one response."""

    prefix: str
    object: str
    chunk_object: str
    stream: type[EventStream] = EventStream

    def __init__(self, model: str, fingerprint: str, body: GenerationBody, show: Callable[[int], str]) -> None:
        """`show` turns a token id into text."""
        self._token_ids, self._show = body.return_token_ids, show
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._head = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The response that is not streamed."""
        choices = [self._common(choice) | self.choice(choice) for choice in generation.choices]
        return self._head | {"object": self.object, "choices": choices, "usage": generation.usage()}

    def chunk(self, *choices: dict[str, Any], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One event of a stream."""
        return self._head | {"object": self.chunk_object, "choices": list(choices), "usage": usage}

    def _common(self, choice: Choice) -> dict[str, Any]:
        """Fields of every choice; `seed` and `token_ids` are extensions."""
        extra: dict[str, Any] = {"token_ids": choice.tokens} if self._token_ids else {}
        if self._prompt_logprobs and choice.stream.sequence is not None:
            entries = choice.stream.sequence.prompt_logprobs
            extra["prompt_logprobs"] = [None, *(self._by_token(entry) for entry in entries)]
        has_logprobs = choice.stream.request.sampling.logprobs is not None
        return {
            "index": choice.index,
            "finish_reason": choice.finish,
            "logprobs": self.logprobs(choice.logprobs, 0) if has_logprobs else None,
            "seed": choice.seed,
        } | extra

    def _logprobs(self, choice: Choice, output: Output) -> dict[str, Any] | None:
        """The log-probabilities of an output's tokens; None if not asked for."""
        if choice.stream.request.sampling.logprobs is None:
            return None
        return self.logprobs(output.logprobs, sum(map(len, choice.text)) - len(output.text))

    def _by_token(self, entry: TokenLogprobs) -> dict[str, Any]:
        """vLLM's form of a position: by token id, the position's own token first."""
        return {str(token): asdict(logprob) for token, logprob in by_token(entry, self._show).items()}

    @abstractmethod
    def logprobs(self, entries: Sequence[TokenLogprobs], start: int) -> dict[str, Any]:
        """OpenAI's form of log-probabilities."""

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """The fields of a whole answer."""

    @abstractmethod
    def first(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """The chunks of a choice before its first output."""

    @abstractmethod
    def delta(self, choice: Choice, output: Output) -> dict[str, Any]:
        """The fields that an output adds to its chunk."""

    def deltas(self, choice: Choice, output: Output) -> Iterator[dict[str, Any]]:
        """The chunks of an output; none if it released neither text nor an end."""
        if output.text or output.finish is not None or output.logprobs or (self._token_ids and output.tokens):
            ids = {"token_ids": list(output.tokens)} if self._token_ids else {}
            end = {"finish_reason": output.finish, "logprobs": self._logprobs(choice, output)}
            seed = {"seed": choice.seed} if output.finish is not None else {}
            # the delta may change the finish_reason
            yield self.chunk({"index": choice.index} | end | seed | ids | self.delta(choice, output))


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, fingerprint: str, body: GenerationBody, show: Callable[[int], str]) -> None:
        super().__init__(model, fingerprint, body, show)
        assert isinstance(body, ChatBody)
        self._tools, self._reasons = bool(body.tools) and body.tool_choice != "none", body.include_reasoning
        # of each choice of a stream
        self._thoughts: dict[int, Thought | None] = {}
        self._held: dict[int, str] = {}  # text that may belong to a tool call

    def choice(self, choice: Choice) -> dict[str, Any]:
        """The assistant's message, with its thought and its tool calls."""
        thought, text = _divided(choice.thought(), "".join(choice.text), ends=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.markers is not None and self._reasons:
            message |= {"content": text or None, "reasoning_content": thought or None}
        if self._tools and TOOL_CALL in text:
            rest, calls = parse_tool_calls(text)
            if calls:
                message |= {"content": rest or None, "tool_calls": [_tool_call(call) for call in calls]}
                return {"message": message, "finish_reason": "tool_calls"}
        return {"message": message}

    def first(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        yield self.chunk({"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None})

    def logprobs(self, entries: Sequence[TokenLogprobs], start: int) -> dict[str, Any]:
        """A list of tokens, each with its likeliest alternatives."""

        def one(token: int, value: float) -> dict[str, Any]:
            text = self._show(token)
            return {"token": text, "logprob": max(value, _LEAST), "bytes": list(text.encode())}

        content = [
            one(entry.token, entry.logprob) | {"top_logprobs": [one(*best) for best in entry.top]} for entry in entries
        ]
        return {"content": content, "refusal": None}

    def delta(self, choice: Choice, output: Output) -> dict[str, Any]:
        """The thought and the text; from the first tool call on it is held back and read at the end."""
        if choice.index not in self._thoughts:
            self._thoughts[choice.index] = choice.thought()
        thought, text = _divided(self._thoughts[choice.index], output.text, ends=output.finish is not None)
        delta: dict[str, Any] = {"reasoning_content": thought} if thought and self._reasons else {}
        if not self._tools:
            return {"delta": delta | ({"content": text} if text else {})}
        text = self._held.pop(choice.index, "") + text
        if output.finish is None:
            start = text.find(TOOL_CALL)
            start = unfinished(text, TOOL_CALL) if start < 0 else start
            text, self._held[choice.index] = text[:start], text[start:]
            return {"delta": delta | ({"content": text} if text else {})}
        rest, calls = parse_tool_calls(text) if TOOL_CALL in text else (text, [])
        delta |= {"content": rest} if rest else {}
        if not calls:
            return {"delta": delta}
        delta["tool_calls"] = [{"index": number} | _tool_call(call) for number, call in enumerate(calls)]
        return {"delta": delta, "finish_reason": "tool_calls"}


class CompletionFormat(Format):
    """text_completion, whole and streamed."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, fingerprint: str, body: GenerationBody, show: Callable[[int], str]) -> None:
        super().__init__(model, fingerprint, body, show)
        assert isinstance(body, CompletionBody)
        self.echo, self._sent, self._n = body.echo, body.prompt, body.n or 1
        self._prompts: list[str] = []  # their texts, if they are echoed

    def choice(self, choice: Choice) -> dict[str, Any]:
        """The text; after the prompt, if it is echoed."""
        if not self.echo:
            return {"text": "".join(choice.text)}
        text = self._prompts[choice.index // self._n]
        whole = {"text": "".join((text, *choice.text))}
        if (count := choice.stream.request.sampling.logprobs) is None or choice.stream.sequence is None:
            return whole
        first = self._show(choice.stream.request.prompt[0])
        lists = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        prompt = self.logprobs([entry.best(count) for entry in choice.stream.sequence.prompt_logprobs], len(first))
        answer = self.logprobs(choice.logprobs, len(text))
        return whole | {"logprobs": {name: values + prompt[name] + answer[name] for name, values in lists.items()}}

    def first(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """The prompt, if it is echoed."""
        if self.echo:
            text = self._prompts[choice.index // self._n]
            yield self.chunk({"index": choice.index, "text": text, "finish_reason": None, "logprobs": None})

    def read_prompts(self) -> None:
        """Note the text of each prompt, as it was sent or that of its tokens. Runs in the tokenizer's thread."""
        sent: Any = self._sent
        if isinstance(sent, str) or isinstance(sent[0], int):
            sent = [sent]
        self._prompts = [prompt if isinstance(prompt, str) else "".join(map(self._show, prompt)) for prompt in sent]

    def delta(self, choice: Choice, output: Output) -> dict[str, Any]:
        """The text."""
        return {"text": output.text}

    def logprobs(self, entries: Sequence[TokenLogprobs], start: int) -> dict[str, Any]:
        """Lists with an entry for each token; of likely tokens that are the same text, the likeliest counts."""
        tokens = [self._show(entry.token) for entry in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [max(entry.logprob, _LEAST) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=start)) if tokens else [],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, value in entry.top:
            top.setdefault(self._show(token), max(value, _LEAST))
        return top


def _divided(thought: Thought | None, text: str, *, ends: bool) -> tuple[str, str]:
    return ("", text) if thought is None else thought.divide(text, ends=ends)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
