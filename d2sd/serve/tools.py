"""Tool calls in the Hermes format, which Qwen uses: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from d2sd.bundle.turns import TOOL_CALL, TOOL_CALL_END
from d2sd.errors import RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.runtime.grammar.guidance import SPACING, literal
from d2sd.runtime.grammar.schemas import with_options

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str  # a JSON object, as text


def check_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameter schema of each function, by name. Raises `RequestError` naming the tool that is malformed."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            expected = '{"type": "function", "function": {"name": ...}}'
            raise RequestError("This is not a tool.", where=where, found=tool, expected=expected)
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in schemas:
            raise RequestError(
                "A function needs a name of its own.",
                where=f"{where}.function.name",
                found=name,
                expected="1 .. 64 letters, digits, _, . or -",
            )
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(
                "The parameters are not a JSON schema.", where=f"{where}.function.parameters", found=parameters
            )
        schemas[name] = parameters or {"type": "object", "properties": {}}
    return schemas


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool = True,
    disable_any_whitespace: bool = False,
    disable_additional_properties: bool = False,
    words: Mapping[str, int] = MappingProxyType({}),
) -> StructuredOutputsParams | None:
    """The form of an answer that must call tools; None where it need not.

    `tools` and `tool_choice` are OpenAI's: "none", "auto" (the default), "required", or one function,
    {"type": "function", "function": {"name": ...}}. `parallel` allows several calls where one is required. The options
    of `StructuredOutputsParams` apply to the arguments. `words` are the `added_words` of the tokenizer. Raises
    `RequestError` for malformed tools and for a choice that is not among them.
    """
    schemas = check_tools(tools)
    if tool_choice in (None, "none", "auto"):
        return None
    if tool_choice != "required":
        function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in schemas:
            raise RequestError(
                "Unknown tool choice.",
                where="tool_choice",
                found=tool_choice,
                expected="none, auto, required or one of the tools",
            )
        schemas, parallel = {name: schemas[name]}, False
    if not schemas:
        raise RequestError("A tool call is required, but there are no tools.", where="tool_choice", found=tool_choice)
    rules = [f"start: call{f' ({_quoted(chr(10))} call)*' if parallel else ''}"]
    rules.append(f"call: {literal(f'{TOOL_CALL}{chr(10)}', words)} body {literal(f'{chr(10)}{TOOL_CALL_END}', words)}")
    rules.append("body: " + " | ".join(f"tool_{index}" for index in range(len(schemas))))
    for index, (name, schema) in enumerate(schemas.items()):
        # each schema is a document of its own, so that its $ref finds its $defs
        begin = '{"name": ' + json.dumps(name) + ', "arguments": '
        schema = with_options(schema, compact=disable_any_whitespace, closed=disable_additional_properties)
        arguments = json.dumps({"x-guidance": SPACING, **schema})
        rules.append(f"tool_{index}: {_quoted(begin)} %json {arguments} {_quoted('}')}")
    return StructuredOutputsParams(grammar="\n".join(rules))


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text outside of tool calls, stripped, and the calls. What is not a complete call stays in the text.

    Arguments are JSON by the standard, whatever the model wrote: numbers are finite, and their text is Unicode.
    """
    rest, calls, at = [], [], 0
    while (start := text.find(TOOL_CALL, at)) >= 0:
        call, end = _parse_call(text, start + len(TOOL_CALL))
        rest.append(text[at : end if call is None else start])
        at = end
        if call is not None:
            calls.append(call)
    return "".join([*rest, text[at:]]).strip(), calls


def _parse_call(text: str, start: int) -> tuple[ToolCall | None, int]:
    """The call whose body begins at `start`, and where the text after it begins."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", {}) if isinstance(value, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        return None, end
    tail = text[end:].strip()
    if tail.startswith(TOOL_CALL_END):
        end = text.index(TOOL_CALL_END, end) + len(TOOL_CALL_END)
    elif TOOL_CALL_END.startswith(tail):  # cut by the length limit
        end = len(text)
    return ToolCall(name, _dump(arguments)), end


def _number(text: str) -> float:
    """The finite number nearest to a JSON number such as 1e999, which JSON has and floats do not."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_no_number)


def _dump(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, which stay escaped
        return json.dumps(arguments)
    return text


def _quoted(text: str) -> str:
    return json.dumps(text)
