"""Templates in a process of their own: transformers' text, and an end for every template that asks for too much."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from d2sd.bundle.template_process import TemplateError, TemplateLimits, TemplateProcess, TooLong
from tests.processes import alive

HONEST = "{% for m in messages %}{{ m.content }}{% endfor %}"
VALUES: dict[str, Any] = {"messages": [{"role": "user", "content": "w1 <é> \U0001f600"}]}
LIMITS = TemplateLimits(seconds=0.2, memory=128 << 20, length=100_000)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(LIMITS)
    yield made
    made.close()


CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: In Qwen3's form: tools as JSON, a namespace, slices, methods of strings, and thoughts that are cut off.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}{%- set ns.last = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' ~ (call.function.arguments | tojson(indent=1)) ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
#: In Llama 3's form: a start token by name, the date, a macro, `generation`, and blocks on lines of their own.
LLAMA = """{{- bos_token }}
{% if not date_string is defined %}
    {% set date_string = strftime_now("%d %b %Y") %}
{% endif %}
{% macro header(role) %}<|start_header_id|>{{ role }}<|end_header_id|>{% endmacro %}
Today: {{ date_string }}
{% for message in messages %}
    {{- header(message['role']) + '\\n\\n' + (message['content'] or '')|trim }}
    {% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] }}<|eot_id|>{% endgeneration %}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ header('assistant') }}{% endif %}
"""
CALL = {"type": "function", "function": {"name": "f", "arguments": {"<b>": [1, 2.5, None, True], "é": "✓"}}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "  1 < 2 & 'x' é\n\n"},
    {"role": "assistant", "content": "<think>\nhm</think>\n\nyes", "tool_calls": [CALL]},
    {"role": "user", "content": "😀 \\n {{ 7 }}"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"required": ["<b>"], "big": 10**20}}}]
NAMED: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"date_string": "1 Jan 2026"}]


@pytest.mark.parametrize("template", [CHATML, QWEN, LLAMA], ids=["ChatML", "Qwen3", "Llama 3"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("opened", [True, False])
def test_the_text_is_transformers_own(process: TemplateProcess, template: str, tools: Any, opened: bool) -> None:
    for turns in (TURNS, TURNS[:1], [{"role": "system", "content": "s"}, *TURNS]):
        for named in NAMED:
            given = {"bos_token": "<s>", "add_generation_prompt": opened} | named
            wanted, _ = render_jinja_template([turns], tools=tools, chat_template=template, **given)
            values = {"messages": turns, "tools": tools, "documents": None, **given}
            assert process.render(template, values) == wanted[0]
            assert turns[-1]["content"].strip() in wanted[0]


@pytest.mark.usefixtures("hostile_folder")
def test_it_runs_nothing_of_the_current_folder() -> None:
    process = TemplateProcess()
    assert process.render(HONEST, VALUES) == VALUES["messages"][0]["content"]
    process.close()


HOSTILE = {
    "a power": "{{ 9**(9**9) }}",
    "a constant, folded while Jinja compiles": "{% if 9**(9**9) %}{% endif %}",
    "a list": "{% set x=[0]*10**9 %}",
    "a format": "{{ '%1000000000d'|format(1) }}",
    "a filter": "{{ 'a'|center(10**10) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
    "output without end": "{% for i in range(99999) %}{% for j in range(99999) %}abc{% endfor %}{% endfor %}",
    "text that doubles": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "macros": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "signs": "{{ " + "-" * 99999 + "1 }}",
    "digits": "{{ '9'|int ** 999999999 }}",
    "sorting": "{{ range(99999)|map('string')|batch(2)|map('join', 'x'*9999)|join|sort }}",
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_template_that_asks_for_too_much_ends_and_the_next_is_rendered(
    process: TemplateProcess, template: str
) -> None:
    before = _processor_seconds()
    with pytest.raises(TemplateError):
        process.render(template, VALUES)
    assert process.render(HONEST, VALUES) == VALUES["messages"][0]["content"]
    process.close()  # its time is counted when it has ended
    assert _processor_seconds() - before < 2


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def test_the_bound_that_was_met_is_named(process: TemplateProcess) -> None:
    for template, named in (
        ("{{ 9**(9**9) }}", "more than 0.2 s"),
        ("{% set x=[0]*10**9 %}", "MemoryError"),
        ("{{ x.y.z }}", "UndefinedError: 'x' is undefined"),
        ("{{ raise_exception('é') }}", "TemplateError: é"),
    ):
        with pytest.raises(TemplateError, match=named):
            process.render(template, VALUES)
    with pytest.raises(TooLong, match="100,00"):
        process.render("{% for i in range(99999) %}abc{% endfor %}", VALUES)
    with pytest.raises(TemplateError, match="not JSON serializable"):
        process.render(HONEST, {"messages": [{"content": object()}]})


def test_threads_take_turns(process: TemplateProcess) -> None:
    def render(index: int) -> str:
        try:
            return process.render(HOSTILE["a list"] if index % 8 == 0 else "{{ i }}" * 50, {"i": index})
        except TemplateError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(render, range(64)))
    assert found == [str(i) * 50 if i % 8 else "MemoryError: " for i in range(64)]


def test_one_process_serves_all_requests_and_a_dead_one_is_replaced(process: TemplateProcess) -> None:
    process.render(HONEST, VALUES)
    first = process._process
    assert first is not None
    process.render(QWEN, VALUES)
    assert process._process is first
    first.kill()
    while first.poll() is None:
        time.sleep(0.01)
    assert process.render(HONEST, VALUES)
    assert process._process is not first


def test_a_process_that_is_stopped_is_given_up(process: TemplateProcess) -> None:
    impatient = TemplateProcess(TemplateLimits(patience=0.3))
    impatient.render(HONEST, VALUES)
    assert impatient._process is not None
    os.kill(impatient._process.pid, signal.SIGSTOP)
    with pytest.raises(TemplateError, match=r"no answer within 0\.3 s"):
        impatient.render(HONEST, VALUES)
    assert impatient.render(HONEST, VALUES)
    impatient.close()


def test_signals_for_the_parent_do_not_end_it(process: TemplateProcess) -> None:
    process.render(HONEST, VALUES)
    child = process._process
    assert child is not None
    assert os.getpgid(child.pid) != os.getpgid(0)  # Ctrl-C in a terminal is sent to a whole group
    for number in (signal.SIGINT, signal.SIGTERM):
        child.send_signal(number)
    assert process.render(HONEST, VALUES)
    assert process._process is child


@pytest.mark.subprocess
def test_it_ends_with_its_parent_and_sees_no_secret(tmp_path: Path) -> None:
    parent, out = os.pipe()
    pid = os.fork()
    if not pid:
        os.environ["D2SD_API_KEY"] = "secret"
        forked = TemplateProcess(LIMITS)
        forked.render(HONEST, VALUES)
        assert forked._process is not None
        os.write(out, str(forked._process.pid).encode())
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.close(out)
    child = int(os.read(parent, 20))
    os.waitpid(pid, os.WUNTRACED)
    folder = Path(f"/proc/{child}")
    if sys.platform == "linux":
        assert b"secret" not in (folder / "environ").read_bytes()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    end = time.monotonic() + 20
    while alive(child):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_rendering_costs_little_once_the_process_runs(process: TemplateProcess) -> None:
    process.render(HONEST, VALUES)
    start = time.thread_time()
    for _ in range(200):
        process.render(HONEST, VALUES)
    assert (time.thread_time() - start) / 200 < 1e-3
