"""The two turns of a tool call through the official client, with a template that knows no tools and fails on null."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from d2sd import LLM, SamplingParams
from tests.d2sd.serve.http import Running
from tests.d2sd.serve.openai.conftest import ANSWERS, SCHEMA

TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "the sky", "parameters": SCHEMA}}
USER: Any = {"role": "user", "content": "Weather?"}


def ask(agent: Running, *messages: Any, **options: Any) -> Any:
    return agent.openai.chat.completions.create(
        model="tiny", messages=list(messages), temperature=1.0, seed=1, **options
    )


def test_a_loop(agent: Running) -> None:
    answer = ask(agent, USER, tools=[TOOL]).choices[0].message
    assert answer.content is None
    (call,) = answer.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    for sent in (answer, answer.model_dump(), answer.model_dump(exclude_none=True)):
        second = ask(agent, USER, sent, result, tools=[TOOL]).choices[0]
        assert (second.message.content in ANSWERS, second.finish_reason) == (True, "stop")


def test_a_loop_of_accumulated_deltas(agent: Running) -> None:
    calls: list[dict[str, Any]] = []
    for chunk in ask(agent, USER, tools=[TOOL], stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            calls.append(part.model_dump())
    assert calls[0]["index"] == 0
    sent = {"role": "assistant", "content": None, "tool_calls": calls}
    second = ask(agent, USER, sent, {"role": "tool", "tool_call_id": calls[0]["id"], "content": "21"}, tools=[TOOL])
    assert second.choices[0].message.content in ANSWERS


def test_the_model_sees_the_tools(agent: Running) -> None:
    with_tools, without = (ask(agent, USER, tools=[TOOL], tool_choice=c, max_tokens=1).usage for c in ("auto", "none"))
    assert with_tools.prompt_tokens > without.prompt_tokens + 100


def test_the_python_api_takes_the_same_turns(agent_bundle: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "21"}]
    with LLM(agent_bundle) as llm:
        assert llm.chat(turns, SamplingParams(max_tokens=2), tools=[TOOL])[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("where", ["response_format", "tool"])
def test_objects_are_closed_for_clients_that_ask(agent: Running, where: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    options: dict[str, Any] = {"extra_body": {"structured_outputs": {"disable_additional_properties": True}}}
    if where == "tool":
        options["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        options["tool_choice"] = "required"
        options["parallel_tool_calls"] = False
    else:
        options["response_format"] = {"type": "json_object", "schema": schema}
    message = ask(agent, USER, **options).choices[0].message
    text = message.content if where == "response_format" else message.tool_calls[0].function.arguments
    assert json.loads(text) == {"a": 1}


def test_parse(agent: Running) -> None:
    class City(BaseModel):
        capital: bool

    found = agent.openai.chat.completions.parse(
        model="tiny", messages=[USER], response_format=City, temperature=1.0, seed=1
    )
    assert isinstance(found.choices[0].message.parsed, City)
