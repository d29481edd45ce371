"""Answers of /v1/responses: whole, and as the events of a stream; the response object and the items of its output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

from d2sd.runtime.sequence import Output, TokenLogprobs
from d2sd.serve.openai.errors import describe
from d2sd.serve.openai.formats import ChatFormat
from d2sd.serve.openai.generation import Choice, Generation, usage_of
from d2sd.serve.openai.protocol import GenerationBody
from d2sd.serve.openai.responses import EventStream
from d2sd.serve.openai.responses_api.protocol import ResponsesBody


class ResponseStream(EventStream):
    """Events with their type as a name, and no [DONE]."""

    end = ""

    def frame(self, event: dict[str, Any]) -> str:
        """The event, named."""
        return f"event: {event['type']}\n{super().frame(event)}"

    def failure(self, error: Exception) -> dict[str, Any]:
        """The error as an event."""
        fault = describe(error)[1]["error"]
        shown = {name: fault[name] for name in ("code", "message", "param")}
        return {"type": "error", "sequence_number": self.sent} | shown


class ResponseFormat(ChatFormat):
    """The response to one body; what is text and what is a tool call is a chat's business."""

    stream = ResponseStream

    def __init__(
        self, request: ResponsesBody, model: str, fingerprint: str, body: GenerationBody, show: Callable[[int], str]
    ) -> None:
        super().__init__(model, fingerprint, body, show)
        self._request = request
        self._response = {
            "id": f"resp_{uuid4().hex}",
            "created_at": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._sequence = 0
        self._output: list[dict[str, Any]] = []  # items of a stream that are done
        self._text: list[str] = []  # of the message of a stream
        self._message = ""  # its id, once it has begun
        self._thought: list[str] = []  # the text of what is thought before
        self._thinks = ""  # its id, while it goes on

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The response that is not streamed."""
        (choice,) = generation.choices
        answer = self.choice(choice)["message"]
        calls = [_function_call(call) for call in answer.get("tool_calls", ())]
        entries = self._entries(choice, choice.logprobs)
        said, thought = answer["content"] or "", answer.get("reasoning_content")
        thoughts = [_reasoning("completed" if said or calls else _status(choice), thought)] if thought else []
        items = [_message(_status(choice), said, entries)] if said or not (calls or thoughts) else []
        return self._at(choice, [*thoughts, *items, *calls], ended=True)

    def first(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """The response before its first output."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._at(choice, [], ended=False))

    def deltas(self, choice: Choice, output: Output) -> Iterator[dict[str, Any]]:
        """The events of an output."""
        delta = self.delta(choice, output)["delta"]
        text, calls = delta.get("content", ""), delta.get("tool_calls", [])
        ends = output.finish is not None
        if thought := delta.get("reasoning_content"):
            yield from self._thinking(thought)
        if self._thinks and (text or ends):
            yield from self._has_thought("completed" if text or calls else _status(choice))
        if text or (ends and not calls and not self._message and not self._output):
            yield from self._begun()
        if text:
            self._text.append(text)
            entries = self._entries(choice, output.logprobs)
            yield self._of_text("response.output_text.delta", delta=text, logprobs=entries)
        if not ends:
            return
        if self._message:
            yield from self._said(_status(choice), self._entries(choice, choice.logprobs))
        for call in calls:
            yield from self._called(_function_call(call))
        kind = "incomplete" if choice.finish == "length" else "completed"
        yield self._event(f"response.{kind}", response=self._at(choice, self._output, ended=True))

    def _entries(self, choice: Choice, last: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Log-probabilities of the answer's last tokens, but for those of its thought, which are not the message's."""
        said = len(choice.tokens) - choice.reasoning if last else 0
        entries: list[dict[str, Any]] = self.logprobs(last[max(0, len(last) - said) :], 0)["content"]
        return entries

    def _at(self, choice: Choice, output: list[dict[str, Any]], *, ended: bool) -> dict[str, Any]:
        return _response(self._response, self._request, choice, output, ended=ended)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _of_text(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._thinks or self._message, "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **place, **fields)

    def _thinking(self, text: str) -> Iterator[dict[str, Any]]:
        """A thought begins, unless it has, and goes on."""
        if not self._thinks:
            item = _reasoning("in_progress", None)
            self._thinks = item["id"]
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._of_text("response.content_part.added", part=_thought_part(""))
        self._thought.append(text)
        yield self._of_text("response.reasoning_text.delta", delta=text)

    def _has_thought(self, status: str) -> Iterator[dict[str, Any]]:
        """The thought ends."""
        text = "".join(self._thought)
        item = _reasoning(status, text, self._thinks)
        yield self._of_text("response.reasoning_text.done", text=text)
        yield self._of_text("response.content_part.done", part=item["content"][0])
        yield self._event("response.output_item.done", output_index=0, item=item)
        self._output.append(item)
        self._thinks = ""

    def _begun(self) -> Iterator[dict[str, Any]]:
        """A message begins, unless it has."""
        if self._message:
            return
        item = _message("in_progress", None, [])
        self._message = item["id"]
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        yield self._of_text("response.content_part.added", part=_text_part("", []))

    def _said(self, status: str, entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The message ends."""
        text = "".join(self._text)
        item = _message(status, text, entries, self._message)
        yield self._of_text("response.output_text.done", text=text, logprobs=entries)
        yield self._of_text("response.content_part.done", part=item["content"][0])
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _called(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A function is called: its arguments are known at once, because calls are read when the answer ends."""
        index = len(self._output)
        begun = item | {"status": "in_progress", "arguments": ""}
        place = {"item_id": item["id"], "output_index": index}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("response.function_call_arguments.done", **place, **done)
        yield self._event("response.output_item.done", output_index=index, item=item)
        self._output.append(item)


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish == "length" else "completed"


def _response(
    head: dict[str, Any], body: ResponsesBody, choice: Choice, output: list[dict[str, Any]], *, ended: bool
) -> dict[str, Any]:
    """The response with its id, time and model as `head`, so far or `ended`."""
    sampling = choice.stream.request.sampling
    cut = choice.finish == "length"
    return head | {
        "object": "response",
        "status": ("incomplete" if cut else "completed") if ended else "in_progress",
        "completed_at": int(time.time()) if ended and not cut else None,
        "incomplete_details": {"reason": "max_output_tokens"} if ended and cut else None,
        "error": None,
        "output": output,
        "usage": _usage(choice) if ended else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "seed": choice.seed,
        "service_tier": "default",
        "background": False,
        "store": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "truncation": body.truncation,
        "user": body.user,
    }


def _message(status: str, text: str | None, logprobs: list[dict[str, Any]], name: str | None = None) -> dict[str, Any]:
    """An item of text; without text, one that begins."""
    content = [] if text is None else [_text_part(text, logprobs)]
    return {
        "id": name or f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _reasoning(status: str, text: str | None, name: str | None = None) -> dict[str, Any]:
    """An item of what is thought; without text, one that begins."""
    content = [] if text is None else [_thought_part(text)]
    head = {"id": name or f"rs_{uuid4().hex}", "type": "reasoning", "status": status}
    return head | {"summary": [], "content": content}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _function_call(call: dict[str, Any]) -> dict[str, Any]:
    """An item of a tool call in a chat's form."""
    return {
        "id": f"fc_{uuid4().hex}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
    }


def _usage(choice: Choice) -> dict[str, Any]:
    """The usage; the counts of speculation are extensions."""
    usage = usage_of([choice])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
