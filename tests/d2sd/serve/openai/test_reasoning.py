"""Answers of a model that thinks, as every API that knows a thought reports it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.d2sd.serve.http import Running
from tests.d2sd.serve.openai.conftest import SCHEMA
from tests.d2sd.serve.openai.responses_api.test_routes import EVENT
from tests.runtime.grammar.tokens import worded_tokenizer

USER: Any = {"role": "user", "content": "Weather?"}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def ask(thinker: Running, **options: Any) -> Any:
    return thinker.openai.chat.completions.create(model="tiny", messages=[USER], extra_body=options)


def streamed(thinker: Running, **options: Any) -> tuple[str, str, list[Any]]:
    """Thought, text and calls of a stream, added up; a delta has a thought or a text where it has any."""
    thought, text, calls = "", "", list[Any]()
    chunks: Any = thinker.openai.chat.completions.create(model="tiny", messages=[USER], stream=True, extra_body=options)
    for chunk in chunks:
        delta = chunk.choices[0].delta
        assert delta.content != "" or delta.role, "an empty text is left out"
        thought += getattr(delta, "reasoning_content", None) or ""
        text += delta.content or ""
        calls += delta.tool_calls or []
    return thought, text, calls


CASES = [
    ("<think>\nIs it?\n</think>\n\nIt is cold.", False, "Is it?", "It is cold."),
    ("Is it?\n</think>\n\nIt is cold.", True, "Is it?", "It is cold."),
    ("It is </think> cold.", False, "", "It is </think> cold."),
    ("<think>\n\n</think>\n\nIt is cold.", False, "", "It is cold."),
]


@pytest.mark.parametrize(("answer", "begins", "thought", "said"), CASES)
def test_a_chat(thinker: Running, say: Any, answer: str, begins: bool, thought: str, said: str) -> None:
    say(answer)
    variables = {"chat_template_kwargs": {"begins": begins}}
    found = ask(thinker, **variables)
    message, usage = found.choices[0].message, found.usage
    assert (message.reasoning_content, message.content) == (thought or None, said)
    assert streamed(thinker, **variables) == (thought, said, [])
    counted = usage.completion_tokens_details.reasoning_tokens
    tokens, end = worded_tokenizer()(answer).input_ids, worded_tokenizer().convert_tokens_to_ids("</think>")
    assert counted == (tokens.index(end) + 1 if begins or answer.startswith("<think>") else 0)
    without = ask(thinker, include_reasoning=False, **variables).choices[0].message
    assert (without.content, getattr(without, "reasoning_content", None)) == (said, None)
    assert streamed(thinker, include_reasoning=False, **variables) == ("", said, [])


@pytest.mark.parametrize("begins", [False, True])
def test_a_call_behind_a_thought(thinker: Running, say: Any, begins: bool) -> None:
    say(("" if begins else "<think>") + f"I look.</think>\n{CALL}")
    options = {"tools": [TOOL], "chat_template_kwargs": {"begins": begins}}
    (choice,) = ask(thinker, **options).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.reasoning_content == "I look."
    thought, text, (call,) = streamed(thinker, **options)
    assert (thought, text, json.loads(call.function.arguments)) == ("I look.", "", {"city": "Oslo"})


def test_a_thought_that_the_limit_cuts(thinker: Running, say: Any) -> None:
    say("<think>one two three four")
    (choice,) = ask(thinker, max_tokens=12).choices
    assert choice.finish_reason == "length"
    assert choice.message.content is None
    assert "one two three four".startswith(choice.message.reasoning_content)


def test_an_answer_of_a_demanded_form_is_said(thinker: Running) -> None:
    """The template has begun a thought, for which the grammar leaves no room."""
    options = {"structured_outputs": {"choice": ["yes"]}, "chat_template_kwargs": {"begins": True}}
    message = ask(thinker, **options).choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == ("yes", None)


def test_text_completions_are_text(thinker: Running) -> None:
    options: Any = {"structured_outputs": {"choice": ["<think>a</think>b"]}}
    found: Any = thinker.openai.completions.create(model="tiny", prompt="x", extra_body=options)
    assert found.choices[0].text == "<think>a</think>b"
    assert found.usage.completion_tokens_details.reasoning_tokens == 0


def responses(thinker: Running, **options: Any) -> tuple[Any, list[Any]]:
    """The whole response and the events of a stream, as the client's types."""
    body = {"model": "tiny", "input": "hello", **options}
    whole = Response.model_validate(thinker.http.post("/v1/responses", json=body).json())
    frames = thinker.http.post("/v1/responses", json=body | {"stream": True}).text.strip().split("\n\n")
    return whole, [EVENT.validate_python(json.loads(frame.split("data: ")[1])) for frame in frames]


@pytest.mark.parametrize(
    ("answer", "items"),
    [
        ("<think>\nIs it?\n</think>\n\nIt is cold.", ["reasoning", "message"]),
        (f"<think>I look.</think>{CALL}", ["reasoning", "function_call"]),
        ("<think>only", ["reasoning"]),
        ("It is cold.", ["message"]),
    ],
)
def test_items_of_a_response(thinker: Running, say: Any, answer: str, items: list[str]) -> None:
    say(answer)
    tools = {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
    whole, events = responses(thinker, **tools)
    last = events[-1].response
    for found in (whole, last):
        assert [item.type for item in found.output] == items
        for item in found.output:
            if item.type == "reasoning":
                assert f"<think>{item.content[0].text}" == answer.split("</think>")[0].replace("\n", "")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [event.output_index for event in done] == list(range(len(items)))
    assert [event.item.id for event in added] == [event.item.id for event in done] == [item.id for item in last.output]
    for event in events:
        if hasattr(event, "item_id"):
            assert event.item_id == last.output[event.output_index].id
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    if "reasoning" in items:
        assert "".join(deltas) == last.output[0].content[0].text


@pytest.mark.parametrize("thought", ["<think>\nIs it?\n</think>", "<think>a</think>", ""])
def test_a_message_has_the_log_probabilities_of_what_it_says(thinker: Running, say: Any, thought: str) -> None:
    """A chat's choice has those of all tokens."""
    say(f"{thought}It is cold.")
    whole, events = responses(thinker, top_logprobs=0)
    (part,) = whole.output[-1].content
    assert "".join(one.token for one in part.logprobs) == "It is cold.<end>"
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [one.token for one in done.logprobs] == [one.token for one in part.logprobs]
    deltas = [one.token for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
    assert "".join(deltas).removesuffix("<end>") == "It is cold."
    (choice,) = ask(thinker, logprobs=True).choices
    assert "".join(one.token for one in choice.logprobs.content) == f"{thought}It is cold.<end>"


def test_earlier_thoughts_are_not_sent_again(thinker: Running) -> None:
    counts = set()
    for thought in ("Is it?", "x" * 50):
        sent = {"role": "assistant", "content": "Cold.", "reasoning_content": thought}
        counts.add(thinker.http.post("/tokenize", json={"messages": [USER, sent, USER]}).json()["count"])
    assert len(counts) == 1


@pytest.mark.parametrize("budget", [0, 1, 7, 20])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_budget_ends_the_thought(thinker: Running, budget: int, options: dict[str, Any]) -> None:
    """A random model ends none by itself. Chats, whole and streamed, and responses think the same."""
    asked = {"chat_template_kwargs": {"begins": True}, "thinking_token_budget": budget, "ignore_eos": True, **options}
    found = ask(thinker, max_tokens=30, return_token_ids=True, **asked)
    (choice,), end = found.choices, worded_tokenizer().convert_tokens_to_ids("</think>")
    assert found.usage.completion_tokens_details.reasoning_tokens == budget + 1
    assert choice.token_ids.index(end) == budget
    assert len(choice.token_ids) == 30
    thought, said, _ = streamed(thinker, max_tokens=30, **asked)
    assert (thought or None, said or None) == (choice.message.reasoning_content, choice.message.content)
    whole, _ = responses(thinker, input=USER["content"], max_output_tokens=30, **asked)
    assert whole.output_text == said
    assert whole.usage
    assert whole.usage.output_tokens_details.reasoning_tokens == budget + 1
    free = ask(thinker, max_tokens=30, **asked | {"thinking_token_budget": -1})
    assert free.usage.completion_tokens_details.reasoning_tokens == 30


def test_a_prompt_may_begin_a_thought(thinker: Running) -> None:
    options: Any = {"thinking_token_budget": 3, "ignore_eos": True}
    for prompt, forced in (("x<think>", True), ("x<think></think>", False)):
        text = thinker.openai.completions.create(model="tiny", prompt=prompt, max_tokens=9, extra_body=options)
        assert ("</think>" in text.choices[0].text) == forced


def test_a_demanded_call_leaves_no_room_for_a_thought(thinker: Running) -> None:
    options = {"tools": [TOOL], "tool_choice": "required", "chat_template_kwargs": {"begins": True}}
    (choice,) = ask(thinker, thinking_token_budget=2, parallel_tool_calls=False, **options).choices
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("budget", [-2, "7", True, 1.5, float("nan"), [], 10**30])
def test_budgets_that_are_none(thinker: Running, budget: Any) -> None:
    """But any number of tokens is one."""
    body = json.dumps({"model": "tiny", "messages": [USER], "max_tokens": 2, "thinking_token_budget": budget})
    found = thinker.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert found.status_code == (200 if budget == 10**30 else 400)
    if found.status_code == 400 and budget == budget:  # NaN is no JSON
        assert found.json()["error"]["param"] == "thinking_token_budget"


def test_a_model_that_does_not_think_has_no_budget(agent: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="does not think between markers") as refused:
        ask(agent, thinking_token_budget=5)
    assert refused.value.param == "thinking_token_budget"
