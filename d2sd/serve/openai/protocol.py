"""Request bodies of OpenAI's API, with vLLM's extensions. Types are strict, and unknown fields are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

TokenIds = list[Annotated[int, Field(ge=0)]]


class Body(BaseModel):
    """A mapping of which every key is known."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream reports in addition to its deltas."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage in every chunk, if there is usage at all


class StructuredOutputs(Body):
    """vLLM's extension: the form of an answer."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(Body):
    """The fields that chat and text completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    # sampling; names and meanings of `d2sd.SamplingParams`
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    # of this server
    deadline: Annotated[float, Field(gt=0)] | None = None  # seconds
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0  # lower values are served first
    cache_salt: Annotated[str, Field(max_length=256)] = ""  # cached prefixes are shared within a salt only

    # accepted for their senders' sake, without effect on an answer
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    logprobs: int | None = None  # the likeliest tokens of each position


class TextPart(Body):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """The function that an earlier answer called."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # null in the messages that clients send back; anything else is refused
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing_content", "a message needs content")
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content as one string, `developer` as `system`."""
    turns = []
    for message in messages:
        turn = message.model_dump(exclude_none=True) | {"content": message.content}
        if isinstance(message.content, list):
            turn["content"] = "".join(part.text for part in message.content)
        if message.role == "developer":
            turn["role"] = "system"
        turns.append(turn)
    return turns
