"""Prepares conversations for chat templates: tools and tool calls also reach a model whose template ignores them.

A template's abilities are found by rendering a probe, as llama.cpp does. Where it shows no tools or no calls, they are
written in the Hermes format, which Qwen's templates use and `d2sd.serve.tools` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from d2sd.bundle.chat import Messages, render_chat
from d2sd.errors import RequestError

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_INTRODUCTION = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
%s
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
{TOOL_CALL}
{{"name": <function-name>, "arguments": <args-json-object>}}
{TOOL_CALL_END}"""

# The probe: a question, a call, and its result.
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "locate",
        "description": "find it",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_ARGUMENTS = {"place": "oslo"}
#: Types of parts that are text, those of the Responses API too.
_TEXTS = ("text", "input_text", "output_text")
_MEDIA = {"image": "Images are", "audio": "Audio is", "video": "Videos are", "file": "Files are"}
_ID = "call00000"  # Mistral's templates take nine letters or digits and nothing else


@dataclass(frozen=True, slots=True)
class Abilities:
    """Support of a chat template for tools."""

    tools: bool  # shows them
    calls: bool  # shows the calls of an assistant's turn
    content: str | None = ""  # replaces the null content of a turn with calls
    text_arguments: bool = False  # wants the arguments of a call as text, not as an object


def encode_turns(
    tokenizer: Any,
    messages: Messages,
    template: Mapping[str, Any],
    where: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return the token ids of a conversation in its chat template, up to the start of the assistant's answer.

    Null content becomes empty text, and the arguments of tool calls become objects, unless the template needs them
    otherwise. The arguments, and what is raised, are those of `render_chat`.
    """
    if all(isinstance(message, Mapping) for message in messages):  # else they are refused
        messages, tools = _prepared(tokenizer, messages, tools)
    text = render_chat(tokenizer, messages, template, where, tools)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids  # the template writes them
    return ids


def _prepared(
    tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None
) -> tuple[Messages, Sequence[Mapping[str, Any]] | None]:
    """The conversation and the tools as the tokenizer's template shows them."""
    turns = [dict(message) for message in messages]
    for index, turn in enumerate(turns):
        if isinstance(turn.get("content"), list):
            turn["content"] = _joined(turn["content"], f"messages[{index}].content")
    _check_calls(turns)
    if tools or any(turn.get("tool_calls") or turn.get("role") == "tool" for turn in turns):
        try:
            able = _abilities(tokenizer, str(tokenizer.chat_template))
            turns = [_native(turn, able) for turn in turns] if able.calls else _written_out(turns)
            if tools and not able.tools:
                turns, tools = _introduced(turns, tools), None
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                "The tools are not JSON.", where="tools", found=f"{type(error).__name__}: {error}"
            ) from None
    for turn in turns:
        if turn.get("content", "") is None and not turn.get("tool_calls"):
            turn["content"] = ""
    return turns, tools


def _check_calls(turns: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError for tool calls that name no function."""
    for index, turn in enumerate(turns):
        calls = turn.get("tool_calls") or ()
        known = isinstance(calls, Sequence) and all(isinstance(call, Mapping) for call in calls)
        if not known or not all(isinstance(_body(call).get("name"), str) for call in calls):
            raise RequestError(
                "These are not tool calls.",
                where=f"messages[{index}].tool_calls",
                found=calls,
                expected='[{"type": "function", "function": {"name": "...", "arguments": "{...}"}}]',
            )


@lru_cache(maxsize=8)
def _abilities(tokenizer: Any, chat_template: str) -> Abilities:
    """Probe the chat template of a tokenizer, whose text is `chat_template`, once: without variables of a request."""

    def shows(needle: str, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Tell whether the text in quotes is in the prompt, neither escaped nor as Python prints it."""
        try:
            text = render_chat(tokenizer, messages, {}, "chat_template", tools)
        except RequestError:
            return False
        return needle in text and not any(f"{quote}{needle}" in text for quote in ("'", '\\"'))

    question: dict[str, Any] = {"role": "user", "content": "where?"}
    tools = shows(_TOOL["function"]["name"], [question], [_TOOL])
    for text_arguments in (False, True):
        for content in ("", None):  # most templates show null as "None", or add it to text
            able = Abilities(tools, True, content, text_arguments)
            call = {"id": _ID, "type": "function", "function": {"name": "locate", "arguments": json.dumps(_ARGUMENTS)}}
            answer = _native({"role": "assistant", "content": None, "tool_calls": [call]}, able)
            if shows(_ARGUMENTS["place"], [question, answer], [_TOOL] if tools else None):
                return able
    return Abilities(tools, calls=False)


def _native(turn: dict[str, Any], able: Abilities) -> dict[str, Any]:
    """A turn as a template wants it that shows tool calls."""
    if not turn.get("tool_calls"):
        return turn
    content = turn.get("content")
    calls = [
        {"type": "function", **call, "function": _function(call, able.text_arguments)} for call in turn["tool_calls"]
    ]
    return turn | {"content": able.content if content is None else content, "tool_calls": calls}


def _written_out(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns whose tool calls are text, and whose results are turns of the user, several in a row one turn."""
    written: list[dict[str, Any]] = []
    results = False  # the last turn has results
    for turn in turns:
        if turn.get("role") == "tool":
            text = f"<tool_response>\n{turn.get('content') or ''}\n</tool_response>"
            if results:
                written[-1]["content"] += f"\n{text}"
            else:
                written.append({"role": "user", "content": text})
            results = True
            continue
        results = False
        if calls := turn.get("tool_calls"):
            texts = [
                f"{TOOL_CALL}\n{json.dumps(_function(call), ensure_ascii=False)}\n{TOOL_CALL_END}" for call in calls
            ]
            said = [turn["content"]] if turn.get("content") else []
            turn = {key: value for key, value in turn.items() if key != "tool_calls"}
            turn["content"] = "\n".join(said + texts)
        written.append(turn)
    return written


def _introduced(turns: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns whose system message lists the tools."""
    text = _INTRODUCTION % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if turns and turns[0].get("role") == "system":
        return [turns[0] | {"content": f"{turns[0]['content'] or ''}\n\n{text}".lstrip()}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _function(call: Mapping[str, Any], text_arguments: bool = False) -> dict[str, Any]:
    """The function of a call, its arguments an object where they are JSON, or as text."""
    body = _body(call)
    arguments = body.get("arguments", {})
    if isinstance(arguments, str) and not text_arguments:
        with suppress(ValueError, RecursionError):  # the model was cut, or wrote no JSON: it sees what it wrote
            arguments = json.loads(arguments or "{}")
    elif text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": body["name"], "arguments": arguments}


def _body(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The name and the arguments of a call, with or without `function` around them."""
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _joined(parts: Sequence[Any], where: str) -> str:
    """The text of OpenAI's parts. Raises RequestError for another part."""
    for index, part in enumerate(parts):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if kind not in _TEXTS or not isinstance(text, str):
            media = next((name for name in _MEDIA if name in str(kind)), None)
            what = f"{_MEDIA[media]} not supported." if media else "This is not a part of text."
            raise RequestError(what, where=f"{where}[{index}]", found=part, expected='{"type": "text", "text": "..."}')
    return "".join(part["text"] for part in parts)
