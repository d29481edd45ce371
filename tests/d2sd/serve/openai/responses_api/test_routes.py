"""/v1/responses through the official client; every response and event is validated as the client's own types."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.d2sd.serve.http import Running
from tests.d2sd.serve.openai.conftest import ANSWERS, SCHEMA

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL: Any = {"type": "function", "name": "weather", "description": "the sky", "parameters": SCHEMA, "strict": True}
FREE: dict[str, Any] = {"structured_outputs": {"regex": "[a-z ]{4,8}"}, "temperature": 1.0, "seed": 3}


def create(agent: Running, **body: Any) -> Any:
    """The response to a body, as the client's type and nothing looser."""
    response = agent.http.post("/v1/responses", json={"model": "tiny", "input": "hello", **body})
    assert response.status_code == 200, response.text
    return Response.model_validate(response.json())


def stream(agent: Running, **body: Any) -> list[Any]:
    """The events of a stream, as the client's types."""
    response = agent.http.post("/v1/responses", json={"model": "tiny", "input": "hello", "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    assert "[DONE]" not in response.text
    found = []
    for frame in response.text.strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(EVENT.validate_python(event))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


@pytest.fixture(scope="module")
def plain(agent: Running) -> str:
    """The text of a response without anything else."""
    text: str = create(agent, **FREE).output_text
    return text


def test_text(agent: Running) -> None:
    found = create(agent, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=50, **FREE)
    assert (found.status, found.incomplete_details, found.error) == ("completed", None, None)
    assert 4 <= len(found.output_text) <= 8
    assert found.usage is not None
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert (found.instructions, found.metadata, found.temperature) == ("Be brief.", {"a": "b"}, 1.0)
    chat = agent.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}], **FREE},
    ).json()
    assert found.output_text == chat["choices"][0]["message"]["content"]
    assert found.usage.input_tokens == chat["usage"]["prompt_tokens"]


def test_a_stream_of_text_adds_up(agent: Running) -> None:
    whole = create(agent, **FREE)
    events = stream(agent, **FREE)
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    last = events[-1].response
    assert "".join(deltas) == events[-4].text == last.output_text == whole.output_text
    assert (last.usage.input_tokens, last.usage.output_tokens) == (whole.usage.input_tokens, whole.usage.output_tokens)
    assert whole.usage.output_tokens_details.accepted_prediction_tokens >= 0
    assert last.output[0].id == events[2].item.id == events[4].item_id
    assert {event.response.id for event in (events[0], events[1])} == {last.id}
    assert events[0].response.output == []


def test_an_answer_that_the_limit_cuts_is_incomplete(agent: Running) -> None:
    options = FREE | {"max_output_tokens": 3, "structured_outputs": {"regex": "[a-z]{40}"}}
    for found in (create(agent, **options), stream(agent, **options)[-1].response):
        assert (found.status, found.output[0].status) == ("incomplete", "incomplete")
        assert found.incomplete_details.reason == "max_output_tokens"
    assert stream(agent, **options)[-1].type == "response.incomplete"


@pytest.mark.slow
def test_a_tool_loop_of_two_turns(agent: Running) -> None:
    client: Any = agent.openai.responses
    items: Any = [{"role": "user", "content": "Weather?"}]
    first = client.create(model="tiny", input=items, tools=[TOOL], temperature=1.0)
    (call,) = first.output
    assert call.type == "function_call"
    assert call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    items += first.output
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "21"}]
    second = client.create(model="tiny", input=items, tools=[TOOL])
    assert second.output_text in ANSWERS
    items += second.output
    items += [{"role": "user", "content": [{"type": "input_text", "text": "And tomorrow?"}]}]
    assert client.create(model="tiny", input=items, tools=[TOOL], tool_choice="none").output_text in ANSWERS


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}])
def test_a_stream_of_a_call(agent: Running, choice: Any) -> None:
    events = stream(agent, tools=[TOOL], tool_choice=choice, temperature=1.0, seed=1)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    (call,) = events[-1].response.output
    assert events[3].delta == events[4].arguments == call.arguments
    assert (events[2].item.arguments, events[2].item.status, call.status) == ("", "in_progress", "completed")
    assert events[2].item.id == events[4].item_id == call.id


@pytest.mark.parametrize(
    "format", [{"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}, {"type": "json_object"}]
)
def test_forms(agent: Running, format: Any) -> None:
    found = create(agent, text={"format": format}, max_output_tokens=24, temperature=1.0, seed=2)
    assert found.text is not None
    if format["type"] == "json_schema":
        assert json.loads(found.output_text)["city"] in ("Oslo", "Rome")
    else:
        assert found.output_text.startswith("{")


def test_logprobs(agent: Running) -> None:
    for options in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        found = create(agent, **FREE, **options).output[0]
        (part,) = found.content
        assert "".join(one.token for one in part.logprobs) == part.text + "<end>"
        events = stream(agent, **FREE, **options)
        (done,) = (event for event in events if event.type == "response.output_text.done")
        wanted = [one.logprob for one in part.logprobs]
        assert [one.logprob for one in done.logprobs] == wanted
        deltas = [one.logprob for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
        assert deltas == wanted[: len(deltas)]
        assert len(deltas) >= len(wanted) - 1  # the end has no text
    assert create(agent, **FREE).output[0].content[0].logprobs == []


@pytest.mark.parametrize(
    "extra",
    [
        {"store": True},
        {"store": False},
        {"truncation": "auto"},
        {"include": ["reasoning.encrypted_content"]},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"service_tier": "auto"},
        {"text": {"format": {"type": "text"}}},
        {"previous_response_id": None, "background": False, "max_tool_calls": 5, "tools": None, "conversation": None},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}]},
        {
            "input": [
                {"type": "reasoning", "id": "r", "summary": []},
                {"role": "user", "content": "hello", "phase": None},
            ]
        },
        {"stream_options": {"include_obfuscation": False}},
        {"prompt_cache_key": "k", "safety_identifier": "s"},
    ],
)
def test_what_changes_nothing_is_accepted(agent: Running, plain: str, extra: dict[str, Any]) -> None:
    assert create(agent, **FREE, **extra).output_text == plain


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.json_schema.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user"}]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_refusals_name_the_parameter(agent: Running, change: Any, param: str) -> None:
    body = {"model": "tiny", "input": "hello", "stream": len(param) % 2 == 1, **change}
    response = agent.http.post("/v1/responses", json=body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"].startswith(param), response.text
    assert agent.service.live == 0


def test_the_route_is_described(agent: Running) -> None:
    described = agent.http.get("/openapi.json").json()
    body = described["paths"]["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = described["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
    assert {"input", "instructions", "tools", "text", "max_output_tokens"} <= fields.keys()


def test_nothing_is_stored(agent: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="not stored"):
        agent.openai.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="not stored"):
        agent.openai.responses.delete("resp_1")
    with pytest.raises(openai.BadRequestError, match="not stored"):
        agent.openai.responses.create(model="tiny", input="x", previous_response_id="resp_1")


def test_an_error_in_a_stream_is_an_event(agent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr("d2sd.serve.openai.responses_api.events.ResponseFormat.delta", fails)
    events = stream(agent, **FREE)
    assert [event.type for event in events] == ["response.created", "response.in_progress", "error"]
    assert events[-1].code == "internal_error"


def test_the_client_streams_and_parses(agent: Running) -> None:
    with agent.openai.responses.stream(model="tiny", input="hello", extra_body=FREE) as found:
        final = found.get_final_response()
    assert final.output_text == create(agent, **FREE).output_text
