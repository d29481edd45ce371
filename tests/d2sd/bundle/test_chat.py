"""Conversations in a chat template, and templates that fail: an error that names the template, in bounded time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d2sd.bundle import chat
from d2sd.bundle.chat import encode_chat, encode_prompt
from d2sd.bundle.template_process import TemplateLimits, TemplateProcess
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.errors import RequestError
from tests.convert.helpers import write_target_dir
from tests.tiny import tiny_decoder

TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'w1 ', 'assistant': 'w2 ', 'system': 'w3 '}[m.role] + m.content + ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}w2{% endif %}{{ ' w9' if thinking else '' }}"
)


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
    assert encode_chat(known, messages, {}, "here") == [3, 10, 1, 11, 2, 12, 1, 13, 2]
    assert encode_chat(known, messages[1:2], {"thinking": True}, "here") == [1, 11, 2, 9]
    whole = known.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encode_chat(known, messages, {}, "here") == whole


FAILING = {
    "raises": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "syntax": ("{% for m in messages %}", "TemplateSyntaxError"),
    "undefined name": ("{{ nobody.role }}", "nobody"),
    "division by zero": ("{{ 1 / 0 }}", "division by zero"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "range too big": ("{% for i in range(999999) %}a{% endfor %}", "range"),
    "not a message": ("{{ messages[5].content }}", "Undefined"),
}


@pytest.mark.parametrize(("template", "named"), FAILING.values(), ids=FAILING.keys())
def test_a_template_that_fails_is_named(folder: Path, template: str, named: str) -> None:
    known = tokenizer(folder, template)
    with pytest.raises(RequestError, match="chat template cannot be rendered") as caught:
        encode_chat(known, [{"role": "user", "content": "w1"}], {}, "bundle/target: chat_template")
    assert caught.value.where == "bundle/target: chat_template"
    assert named.lower() in str(caught.value).lower()


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}"


def test_a_template_that_takes_too_long_is_named_and_the_next_is_rendered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = TemplateProcess(TemplateLimits(seconds=0.1))
    monkeypatch.setattr(chat, "PROCESS", limited)
    with pytest.raises(RequestError, match="cannot be rendered") as caught:
        encode_chat(tokenizer(folder, NESTED), [{"role": "user", "content": "w1"}], {}, "bundle/target: chat_template")
    assert (caught.value.found, caught.value.where) == ("more than 0.1 s", "bundle/target: chat_template")
    assert encode_chat(tokenizer(folder, TEMPLATE), [{"role": "user", "content": "w11"}], {}, "here") == [1, 11, 2]
    limited.close()


def test_output_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = TemplateProcess(TemplateLimits(length=1000))
    monkeypatch.setattr(chat, "PROCESS", limited)
    known = tokenizer(folder, "{% for i in range(999) %}w1 {% endfor %}")
    with pytest.raises(RequestError, match=r"renders too much text(.|\n)*1,002 characters(.|\n)*at most 1,000"):
        encode_chat(known, [{"role": "user", "content": "w1"}], {}, "here")
    limited.close()


def test_a_tokenizer_with_several_templates_takes_the_one_for_tools(folder: Path) -> None:
    known = tokenizer(folder, TEMPLATE)
    known.chat_template = {"default": "w1 {{ eos_token }}", "tool_use": "w2 {{ tools[0].name }}"}
    turns, tools = [{"role": "user", "content": "w1"}], [{"name": "w5"}]
    assert encode_chat(known, turns, {}, "here") == known("w1 " + known.eos_token).input_ids
    assert encode_chat(known, turns, {}, "here", tools) == [2, 5]
    known.chat_template = {"other": "w1"}
    with pytest.raises(RequestError, match="multiple chat templates"):
        encode_chat(known, turns, {}, "here")


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
        encode_chat(tokenizer(folder, TEMPLATE), messages, {}, "here")


def test_text_that_is_not_unicode_is_refused(folder: Path) -> None:
    known = tokenizer(folder, TEMPLATE)
    with pytest.raises(RequestError, match="not Unicode"):
        encode_prompt(known, "w1 \udcff")
    with pytest.raises(RequestError, match=r"not Unicode(.|\n)*messages\[0\]\.content"):
        encode_chat(known, [{"role": "user", "content": "w1 \ud800"}], {}, "here")
    with pytest.raises(RequestError, match="not Unicode"):
        encode_chat(tokenizer(folder, "{{ '\\ud800' }}"), [{"role": "user", "content": "w1"}], {}, "here")
