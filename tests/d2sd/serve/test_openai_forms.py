"""Structured output and tool calls through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from d2sd.serve.openai.formats import ChatFormat
from d2sd.serve.openai.protocol import ChatBody
from tests.d2sd.serve.conftest import build_tiny
from tests.d2sd.serve.http import Running, serving
from tests.runtime.grammar.tokens import tokenizer, vocab_size
from tests.tiny import tiny_decoder

USER: Any = {"role": "user", "content": "Say it."}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "now", "parameters": SCHEMA}}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools[0].function.name }}{% endif %}>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("forms")
    limits = {"max_batch": 4, "max_context": 256}
    decoder = tiny_decoder(vocab=vocab_size())
    with serving(build_tiny(folder, template=TEMPLATE, decoder=decoder, words=tokenizer(), limits=limits)) as running:
        yield running


def ask(server: Running, **options: Any) -> Any:
    values: dict[str, Any] = {"model": "tiny", "messages": [USER], "temperature": 1.0, "seed": 1, "max_tokens": 120}
    return server.openai.chat.completions.create(**values | options)


def test_response_formats(server: Running) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        found = ask(server, response_format=wanted, seed=seed)
        assert json.loads(found.choices[0].message.content)["a"] in (1, 22)
    text = ask(server, response_format={"type": "text"}).choices[0].message.content
    assert text == ask(server).choices[0].message.content
    found = server.openai.completions.create(
        model="tiny", prompt="5", max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert found.choices[0].text in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_tool_calls(server: Running, choice: Any) -> None:
    found = ask(server, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = found.choices[0].message.tool_calls
    assert (found.choices[0].finish_reason, found.choices[0].message.content) == ("tool_calls", None)
    assert (call.type, call.function.name) == ("function", "now")
    assert json.loads(call.function.arguments)["a"] in (1, 22)
    chunks = list(ask(server, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, stream=True))
    (streamed,) = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    assert (streamed.index, streamed.function) == (0, replace_type(streamed.function, call.function))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    # the template renders the call that is sent back, and the tools unless they are switched off
    answer = found.choices[0].message.model_dump()
    again = [USER, answer, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    assert ask(server, messages=again, tools=[TOOL], max_tokens=2).usage.prompt_tokens > 0
    lengths = [ask(server, tools=[TOOL], tool_choice=c, max_tokens=1).usage.prompt_tokens for c in ("auto", "none")]
    assert lengths[0] > lengths[1]


def replace_type(streamed: Any, function: Any) -> Any:
    """A whole answer's function as the class that streams have."""
    return type(streamed)(name=function.name, arguments=function.arguments)


def test_text_before_a_call_streams_and_the_call_is_held_back() -> None:
    class Choice:
        index = 0

    class Output:
        def __init__(self, text: str, finish: str | None = None) -> None:
            self.text, self.finish = text, finish

    body = ChatBody.model_validate({"messages": [USER], "tools": [TOOL]})
    pieces = ["Let me <b>see</b>.<too", "l_c", 'all>{"name": "now", "argu', 'ments": {"a": 1}}</tool_', "call> Done"]
    shape = ChatFormat("m", "f", body, str)
    found = [shape.delta(Choice(), Output(piece))["delta"] for piece in pieces]  # type: ignore[arg-type]
    assert found == [{"content": "Let me <b>see</b>."}, {}, {}, {}, {}]
    last = shape.delta(Choice(), Output(".", "stop"))  # type: ignore[arg-type]
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["content"].strip() == "Done."
    assert last["delta"]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": 1}'}
    shape = ChatFormat("m", "f", body, str)
    texts = [shape.delta(Choice(), Output(p, f))["delta"] for p, f in (("a <tool", None), ("ing", "stop"))]  # type: ignore[arg-type]
    assert texts == [{"content": "a "}, {"content": "<tooling"}]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, "response"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "required"}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"rule": "x"}}}, "structured_outputs.rule"),
    ],
)
def test_forms_that_cannot_be_are_refused(server: Running, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(server, **options)
    assert raised.value.param is not None
    assert param in raised.value.param
    assert server.service.live == 0
