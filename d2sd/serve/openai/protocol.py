"""Request bodies of OpenAI's API, with vLLM's extensions.

Types are strict, and unknown fields are errors. But null is absent, a whole float is an integer, messages may have more
keys than these, and a field that this server lacks may have the value that changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from d2sd.recipe import TEMPLATE_ARGUMENTS
from d2sd.serve.fields import Texts, TokenIds, body_fields


class Body(BaseModel):
    """A mapping of which every key is known."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, body: Any) -> Any:
        """Leave out what is null, and read 3.0 as 3."""
        if not isinstance(body, dict):
            return body
        return {
            key: int(value) if isinstance(value, float) and value.is_integer() else value
            for key, value in body.items()
            if value is not None
        }


class Part(Body):
    """A mapping in a conversation, which may have keys that this server does not know."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(Body):
    """Options of a stream: reports in addition to its deltas."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage in every chunk, if there is usage at all
    include_obfuscation: bool = False  # without effect: nothing is added to a chunk


class StructuredOutputs(Body):
    """vLLM's extension: the form of an answer, or options for the form that another field asks for."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


_Fields: Any = create_model("_Fields", __base__=Body, **body_fields("all"))
_CompletionFields: Any = create_model("_CompletionFields", __base__=Body, **body_fields("completions"))


class SampledBody(_Fields):  # type: ignore[misc]
    """The fields that every body has which asks for answers: those of the table `FIELDS`, and these."""

    model: str | None = None
    stream: bool = False

    structured_outputs: StructuredOutputs | None = None

    # of this server
    deadline: Annotated[float, Field(gt=0)] | None = None  # seconds
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0  # lower values are served first
    cache_salt: Annotated[str, Field(max_length=256)] = ""  # cached prefixes are shared within a salt only


class GenerationBody(SampledBody, _CompletionFields):  # type: ignore[misc]
    """The fields that chat and text completions share."""

    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool = False


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: int | None = None  # the likeliest tokens of each position
    echo: bool = False  # the answer begins with the prompt; then max_tokens may be 0
    suffix: Literal[""] = ""
    add_special_tokens: Literal[True] = True


def _only_text(content: Any) -> Any:
    """Refuse images and other parts by what they are; the rest is left to the types."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and "text" not in kind:
            what = next((name for name in ("image", "audio", "video", "file") if name in kind), "part")
            raise PydanticCustomError("not_text", "{what}s are not supported, only text", {"what": what})
    return content


#: The content of a message, before its parts are read.
Content = BeforeValidator(_only_text)


class TextPart(Part):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class FunctionCall(Part):
    """The function that an earlier answer called."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Part):
    """A tool call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Part):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Annotated[list[TextPart], Field(fail_fast=True)] | None, Content] = None
    name: str | None = None
    reasoning_content: str | None = None  # what the assistant thought; templates of thinking models show it
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # would change the answer
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise PydanticCustomError("missing_content", "a message needs content")
        return self


def _are_free(variables: dict[str, Any]) -> dict[str, Any]:
    if reserved := sorted(TEMPLATE_ARGUMENTS.intersection(variables)):
        raise PydanticCustomError("taken", "{name} is not a variable of the template", {"name": reserved[0]})
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_are_free)]


class TemplateBody(Body):
    """Arguments of the chat template, as in vLLM."""

    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(GenerationBody, TemplateBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    include_reasoning: bool = True  # what a model thinks is reported
    prediction: dict[str, Any] | None = None  # a guess at the answer, which it would not change
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] = "medium"
    add_special_tokens: Literal[False] = False  # the template writes them
    echo: Literal[False] = False


class TokenizeBody(TemplateBody):
    """POST /tokenize: a prompt, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None


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
