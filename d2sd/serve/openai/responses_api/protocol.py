"""The body of POST /v1/responses, and the chat that it is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from d2sd.errors import RequestError
from d2sd.serve.openai.protocol import Body, ChatBody, Content, Effort, Part, SampledBody, TemplateVariables

#: An item of `include` that asks for log-probabilities; the others are of things that this server does not have.
_LOGPROBS = "message.output_text.logprobs"
#: The parts that an item of each type needs.
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class ItemPart(Part):
    """A part of an item's content; only text is supported."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class Item(Part):
    """An item of a conversation: a message, a function call, its output, or reasoning, which is left out."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[str | list[ItemPart] | None, Content] = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Annotated[str | list[ItemPart] | None, Content] = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if missing := [name for name in _NEEDED[self.type] if getattr(self, name) is None]:
            raise PydanticCustomError(
                "missing_part", "a {type} needs {name}", {"type": self.type, "name": ", ".join(missing)}
            )
        return self


class FunctionTool(Part):
    """A function that the answer may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Body):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """How much the model thinks, where its template has a say; there are no summaries."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ObfuscationOptions(Body):
    """Options of a stream, without effect: nothing is added to an event."""

    include_obfuscation: bool = False


class ResponsesBody(SampledBody):
    """POST /v1/responses."""

    input: Annotated[list[Item], Field(min_length=1)]  # a string is a message of the user
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream_options: ObfuscationOptions | None = None
    chat_template_kwargs: TemplateVariables | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None

    # without effect
    truncation: Literal["auto", "disabled"] = "disabled"  # an input that is too long is refused
    max_tool_calls: int | None = None  # of tools that the server runs: it has none
    background: Literal[False] = False

    @field_validator("input", mode="before")
    @classmethod
    def _as_items(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @field_validator("previous_response_id", "conversation")
    @classmethod
    def _is_not_stored(cls, value: Any) -> None:
        if value is not None:
            raise PydanticCustomError("not_stored", "responses are not stored: send the earlier items in `input`")

    def chat(self) -> ChatBody:
        """The same request as a chat. Raises `RequestError` for an input without a message."""
        shared = {name: getattr(self, name) for name in SampledBody.model_fields if name in self.model_fields_set}
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
            choice = {"type": "function", "function": {"name": choice["name"]}}
        tools = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools or ()]
        more = {
            "messages": _messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format if self.text else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "logprobs": self.top_logprobs is not None or _LOGPROBS in (self.include or ()),
            "top_logprobs": self.top_logprobs,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatBody.model_validate(shared | more)


def _messages(instructions: str | None, items: list[Item]) -> list[dict[str, Any]]:
    """The turns of a chat. Calls belong to the turn of the assistant that they follow."""
    turns: list[dict[str, Any]] = [] if not instructions else [{"role": "system", "content": instructions}]
    for item in items:
        if item.type == "message":
            turns.append({"role": item.role, "content": _text(item.content)})
        elif item.type == "function_call":
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": None})
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            turns[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    if not turns:
        raise RequestError("The input has no message.", where="input", found="only reasoning")
    return turns


def _text(content: str | list[ItemPart] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""
