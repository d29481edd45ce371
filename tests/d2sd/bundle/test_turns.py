"""Tool loops in chat templates of several families: what a template does with tools, and what it is given."""

from __future__ import annotations

import json
from copy import copy
from typing import Any

import pytest

from d2sd.bundle import turns
from d2sd.bundle.chat import encode_chat
from d2sd.bundle.turns import encode_turns
from d2sd.errors import RequestError
from d2sd.serve.tools import parse_tool_calls
from tests.runtime.grammar import tokens

USER: Any = {"role": "user", "content": "Weather in Oslo?"}
ARGUMENTS = '{"city": "Oslo", "days": [1, null]}'
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
ASKED: Any = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Any = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "the sky", "parameters": {}}}
LOOP = [USER, ASKED, RESULT]

#: Ignores tools and calls, and adds null to text: SmolLM2's.
CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: Shows tools and calls, with the arguments as JSON of an object: Qwen2.5's and Llama 3.1's.
QWEN = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}"
)
#: Shows calls if the content is null, with the arguments added as text: DeepSeek's.
DEEPSEEK = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ '[' + c.function.name + c.function.arguments + ']' }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
#: Prints arguments without quoting them as JSON, so an object would be Python's.
PRINTING = QWEN.replace("c.function.arguments | tojson", "c.function.arguments")
#: Lists tools and ignores calls.
LISTING = CHATML.replace("{% for m", "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m", 1)


def shown(template: str, messages: Any, tools: Any = None, **variables: Any) -> str:
    """The prompt that a template makes of a conversation."""
    tokenizer = copy(tokens.tokenizer())
    tokenizer.chat_template = template
    text: str = tokenizer.decode(encode_turns(tokenizer, messages, variables, "here", tools))
    return text


def test_a_template_that_ignores_tools_gets_them_as_text() -> None:
    text = shown(CHATML, LOOP, [TOOL])
    assert text.startswith("<system># Tools\n")
    assert json.dumps(TOOL) in text
    assert text.endswith(
        "<user>Weather in Oslo?\n"
        f'<assistant><tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        "<user><tool_response>\nsunny\n</tool_response>\n<assistant>"
    )
    assert parse_tool_calls(text.split("<assistant>")[1])[1][0].arguments == ARGUMENTS
    system = {"role": "system", "content": "Be brief."}
    assert shown(CHATML, [system, USER], [TOOL]).startswith("<system>Be brief.\n\n# Tools\n")


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (QWEN, f'<assistant><tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>'),
        (PRINTING, f'<assistant><tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>'),
        (DEEPSEEK, f"<assistant>[weather{ARGUMENTS}]"),
    ],
    ids=["object", "printed", "null content and text"],
)
def test_a_template_that_shows_calls_gets_them_as_it_needs_them(template: str, call: str) -> None:
    text = shown(template, LOOP, [TOOL])
    assert text == f"{json.dumps(TOOL)}<user>Weather in Oslo?{call}<tool>sunny"
    as_object = CALL | {"function": {"name": "weather", "arguments": json.loads(ARGUMENTS)}}
    assert shown(template, [USER, ASKED | {"tool_calls": [as_object]}, RESULT], [TOOL]) == text


def test_a_template_that_lists_tools_but_ignores_calls() -> None:
    text = shown(LISTING, LOOP, [TOOL])
    assert text.startswith(json.dumps(TOOL) + "<user>")
    assert "# Tools" not in text
    assert '<assistant><tool_call>\n{"name": "weather"' in text


@pytest.mark.parametrize("template", [CHATML, QWEN, DEEPSEEK, PRINTING, LISTING])
@pytest.mark.parametrize("content", [None, ""])
def test_null_is_empty_text(template: str, content: str | None) -> None:
    said = [USER, {"role": "assistant", "content": content}, USER]
    assert shown(template, said) == shown(template, [USER, {"role": "assistant", "content": ""}, USER])
    assert "None" not in shown(template, [USER, ASKED | {"content": content}, RESULT, USER])


def test_results_in_a_row_are_one_turn_and_text_before_a_call_stays() -> None:
    asked = {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}], "tool_calls": [CALL, CALL]}
    text = shown(CHATML, [USER, asked, RESULT, RESULT | {"content": "19 C"}, USER])
    assert text.count("<user>") == 3
    assert "<assistant>Let me see.\n<tool_call>" in text
    assert "sunny\n</tool_response>\n<tool_response>\n19 C\n" in text


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    cut = CALL | {"function": {"name": "weather", "arguments": '{"city": "Os'}}
    for template in (CHATML, QWEN):
        assert json.dumps('{"city": "Os') in shown(template, [USER, ASKED | {"tool_calls": [cut]}])


def test_a_template_is_probed_once_whatever_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []

    def counted(*given: Any) -> list[int]:
        rendered.append(given)
        return encode_chat(*given)

    monkeypatch.setattr(turns, "encode_chat", counted)
    tokenizer = copy(tokens.tokenizer())
    tokenizer.chat_template = QWEN
    for number in range(3):
        encode_turns(tokenizer, LOOP, {"variable": number}, "here", [TOOL])
    assert len(rendered) == 3 + 2  # one probe for tools, one for calls


@pytest.mark.parametrize("calls", [[5], "call", [{}], [{"function": {}}], [{"function": 5}], {"name": "f"}])
def test_malformed_calls_are_refused(calls: Any) -> None:
    with pytest.raises(RequestError) as caught:
        shown(CHATML, [USER, ASKED | {"tool_calls": calls}])
    assert caught.value.where == "messages[1].tool_calls"
    with pytest.raises(RequestError):
        shown(CHATML, [USER, 5])
    with pytest.raises(RequestError, match="not JSON"):
        shown(CHATML, [USER], [{"type": "function", "function": {"name": object()}}])
