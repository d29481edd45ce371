"""Conversations in a chat template, and templates that fail: an error that names the template, in bounded time."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from d2sd.bundle import chat, turns
from d2sd.bundle.chat import encode_prompt, render_chat
from d2sd.bundle.template_process import TemplateLimits, TemplateProcess
from d2sd.bundle.turns import encode_turns
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.errors import RequestError
from d2sd.serve.tools import parse_tool_calls
from tests.convert.helpers import write_target_dir
from tests.runtime.grammar import tokens
from tests.tiny import tiny_decoder

TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'w1 ', 'assistant': 'w2 ', 'system': 'w3 '}[m.role] + m.content + ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}w2{% endif %}{{ ' w9' if thinking else '' }}"
)


W1: dict[str, Any] = {"role": "user", "content": "w1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_dir(tmp_path_factory.mktemp("chat") / "target", tiny_decoder())


def tokenizer(folder: Path, template: str) -> Any:
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    return load_tokenizer(folder)


def test_every_turn_of_a_conversation_is_in_the_prompt(folder: Path) -> None:
    turns = [("system", "w10"), ("user", "w11"), ("assistant", "w12"), ("user", "w13")]
    messages = [{"role": role, "content": content} for role, content in turns]
    known = tokenizer(folder, TEMPLATE)
    assert encode_turns(known, messages, {}, "here") == [3, 10, 1, 11, 2, 12, 1, 13, 2]
    assert encode_turns(known, messages[1:2], {"thinking": True}, "here") == [1, 11, 2, 9]
    whole = known.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encode_turns(known, messages, {}, "here") == whole


FAILING = {
    "raises": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "syntax": ("{% for m in messages %}", "TemplateSyntaxError"),
    "not a message": ("{{ messages[5].content }}", "Undefined"),
}


@pytest.mark.parametrize(("template", "named"), FAILING.values(), ids=FAILING.keys())
def test_a_template_that_fails_is_named(folder: Path, template: str, named: str) -> None:
    known = tokenizer(folder, template)
    with pytest.raises(RequestError, match="chat template cannot be rendered") as caught:
        encode_turns(known, [W1], {}, "bundle/target: chat_template")
    assert caught.value.where == "bundle/target: chat_template"
    assert named.lower() in str(caught.value).lower()


def test_output_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = TemplateProcess(TemplateLimits(length=1000))
    monkeypatch.setattr(chat, "PROCESS", limited)
    with pytest.raises(RequestError, match=r"renders too much text(.|\n)*1,002 characters(.|\n)*at most 1,000"):
        encode_turns(tokenizer(folder, "{% for i in range(999) %}w1 {% endfor %}"), [W1], {}, "here")
    limited.close()


def test_a_tokenizer_with_several_templates_takes_the_one_for_tools(folder: Path) -> None:
    known = tokenizer(folder, TEMPLATE)
    known.chat_template = {"default": "w1 {{ eos_token }}", "tool_use": "w2 {{ tools[0].function.name }}"}
    turns, tools = [W1], [{"type": "function", "function": {"name": "w5"}}]
    assert encode_turns(known, turns, {}, "here") == known("w1 " + known.eos_token).input_ids
    assert encode_turns(known, turns, {}, "here", tools) == [2, 5]
    known.chat_template = {"other": "w1"}
    with pytest.raises(RequestError, match="multiple chat templates"):
        encode_turns(known, turns, {}, "here")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["w1"],
        [{"content": "w1"}],
        [{"role": 1, "content": "w1"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
    ],
)
def test_malformed_messages_are_refused(folder: Path, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"messages"):
        encode_turns(tokenizer(folder, TEMPLATE), messages, {}, "here")


def test_text_that_is_not_unicode_is_refused(folder: Path) -> None:
    known = tokenizer(folder, TEMPLATE)
    with pytest.raises(RequestError, match="not Unicode"):
        encode_prompt(known, "w1 \udcff")
    with pytest.raises(RequestError, match=r"not Unicode(.|\n)*messages\[0\]\.content"):
        encode_turns(known, [{"role": "user", "content": "w1 \ud800"}], {}, "here")
    with pytest.raises(RequestError, match="not Unicode"):
        encode_turns(tokenizer(folder, "{{ '\\ud800' }}"), [W1], {}, "here")


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

    def counted(*given: Any) -> str:
        rendered.append(given)
        return render_chat(*given)

    monkeypatch.setattr(turns, "render_chat", counted)
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


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_parts_of_text_are_one_text(folder: Path, tools: Any) -> None:
    """Parts are joined as by the server, in OpenAI's chats and in its responses."""
    known = tokenizer(folder, TEMPLATE)
    parts = [{"type": "text", "text": "w5 "}, {"type": "input_text", "text": "w7"}, {"type": "output_text", "text": ""}]
    for content, text in ((parts, "w5 w7"), ([], ""), (parts[:1], "w5 ")):
        joined = [{"role": "system", "content": content}, {"role": "user", "content": content}]
        whole = [{"role": "system", "content": text}, {"role": "user", "content": text}]
        assert encode_turns(known, joined, {}, "t", tools) == encode_turns(known, whole, {}, "t", tools)


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9999}},
            "Images are not supported",
        ),
        ({"type": "input_image", "image_url": "x"}, "Images are not supported"),
        ({"type": "image"}, "Images are not supported"),
        ({"type": "input_audio", "input_audio": {}}, "Audio is not supported"),
        ({"type": "video_url", "video_url": {}}, "Videos are not supported"),
        ({"type": "file", "file": {}}, "Files are not supported"),
        ({"type": "text"}, "not a part of text"),
        ({"type": "text", "text": 5}, "not a part of text"),
        ({"text": "w5"}, "not a part of text"),
        ({"type": ["text"], "text": "w5"}, "not a part of text"),
        ("w5", "not a part of text"),
        (None, "not a part of text"),
        (7, "not a part of text"),
    ],
)
def test_another_part_is_refused_by_its_place(folder: Path, part: Any, told: str) -> None:
    content = [{"type": "text", "text": "w5"}, part]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "w5"}, {"role": "user", "content": content}]
    with pytest.raises(RequestError, match=told) as refused:
        encode_turns(tokenizer(folder, TEMPLATE), messages, {}, "t")
    assert refused.value.where == "messages[1].content[1]"
    assert len(str(refused.value)) < 1000
