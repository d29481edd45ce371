"""Tool calls: what is demanded of an answer, and how calls are read from its text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from d2sd.errors import RequestError
from d2sd.runtime.grammar.grammar import has
from d2sd.runtime.grammar.guidance import GuidanceTokenizer, added_words
from d2sd.serve.tools import ToolCall, parse_tool_calls, tool_grammar
from tests.runtime.grammar.test_guidance import fits
from tests.runtime.grammar.tokens import END, guidance, vocab_size, worded_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def takes(text: str, choice: Any, **options: Any) -> bool:
    form = tool_grammar(TOOLS, choice, **options)
    assert form is not None
    assert form.grammar is not None
    return fits(guidance().lark(form.grammar, "tools"), text)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_nothing_is_demanded(choice: str | None) -> None:
    assert tool_grammar(TOOLS, choice) is None


def test_required_and_named() -> None:
    assert takes(WEATHER, "required")
    assert takes(NOW, "required")
    assert takes(f"{WEATHER}\n{NOW}", "required")
    assert not takes(f"{WEATHER}\n{NOW}", "required", parallel=False)
    assert not takes(WEATHER.replace("Oslo", "Bonn"), "required")
    assert not takes("hello", "required")
    choice = {"type": "function", "function": {"name": "now"}}
    assert takes(NOW, choice)
    assert not takes(WEATHER, choice)
    assert not takes(f"{NOW}\n{NOW}", choice)


def test_a_model_that_has_words_for_calls_writes_them() -> None:
    tokens = worded_tokenizer()
    form = tool_grammar(TOOLS[1:], "required", parallel=False, words=added_words(tokens))
    assert form is not None
    assert form.grammar is not None
    grammar = GuidanceTokenizer(tokens, frozenset({END}), vocab_size()).lark(form.grammar, "tools")
    call = tokens(NOW).input_ids
    matcher = grammar.matcher()
    assert {call[0], call[-1]} <= set(added_words(tokens).values())
    for token in (*call, END):
        assert has(matcher.allowed(), token), tokens.decode([token])
        assert token == END or matcher.consume(token)


@pytest.mark.parametrize(
    ("tools", "choice", "where"),
    [
        (TOOLS, "always", "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "nope"}}, "tool_choice"),
        ([], "required", "tool_choice"),
        (["now"], "auto", "tools[0]"),
        ([{"type": "function"}], "auto", "tools[0]"),
        ([*TOOLS, TOOLS[1]], "auto", "tools[2].function.name"),
        ([{"type": "function", "function": {"name": 'a"'}}], "auto", "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameters": "x"}}], "auto", "tools[0].function.parameters"),
    ],
)
def test_refusals(tools: Any, choice: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        tool_grammar(tools, choice)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("hello", "hello", []),
        (WEATHER, "", [("get_weather", {"city": "Oslo"})]),
        (f"Let me see.\n{WEATHER}\n{NOW} ", "Let me see.", [("get_weather", {"city": "Oslo"}), ("now", {})]),
        ('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}!', "!", [("f", {"x": "</tool_call>"})]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        (NOW[:-4], "", [("now", {})]),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        (f"<tool_call> no {NOW}", "<tool_call> no", [("now", {})]),
        ("<tool_call>" + "[" * 20_000, "<tool_call>" + "[" * 20_000, []),
    ],
)
def test_parsing(text: str, rest: str, calls: list[tuple[str, Any]]) -> None:
    found_rest, found = parse_tool_calls(text)
    assert found_rest == rest
    assert found == [ToolCall(name, json.dumps(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": 1e999, "b": [-1e999]}', '{"a": 1.7976931348623157e+308, "b": [-1.7976931348623157e+308]}'),
        ('{"a": "\\ud800", "b": "é"}', '{"a": "\\ud800", "b": "\\u00e9"}'),
        ('{"a": "é"}', '{"a": "é"}'),
        ('{"a": NaN}', None),
        ('{"a": -Infinity}', None),
    ],
)
def test_arguments_are_json_and_unicode(written: str, arguments: str | None) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    rest, calls = parse_tool_calls(text)
    if arguments is None:
        assert (rest, calls) == (text, [])
        return
    (call,) = calls
    assert call.arguments == arguments
    call.arguments.encode()


def test_a_name_that_no_function_can_have_is_no_call() -> None:
    for name in ("\\ud800", "a b", ""):
        text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        assert parse_tool_calls(text) == (text, [])
