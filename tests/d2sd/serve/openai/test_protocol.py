"""Clients send fields beside what they ask for: these change no answer, and are not refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from d2sd.recipe import TEMPLATE_ARGUMENTS
from d2sd.serve.openai.protocol import ChatBody, CompletionBody
from tests.d2sd.serve.conftest import TEMPLATE, build_tiny
from tests.d2sd.serve.http import Running, serving

USER: Any = {"role": "user", "content": "w5 w7"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 4, "temperature": 1.0, "seed": 3}
TEXT: dict[str, Any] = {"prompt": "w5 w7", "max_tokens": 4, "temperature": 1.0, "seed": 3}

#: Fields of clients with the value that changes nothing.
HARMLESS: list[dict[str, Any]] = [
    {"echo": False},
    {"store": False},
    {"store": True},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"best_of": 1},
    {"n": 1, "best_of": 1},
    {"functions": None, "function_call": None},
    {"never_heard_of": None},
    {"max_tokens": 4.0},
    {"top_k": 0.0},
    {"seed": 3.0},
    {"n": 1.0},
    {"use_beam_search": False},
    {"length_penalty": 1.0},
    {"skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"logit_bias": {}},
    {"stop": []},
    {"user": "me", "metadata": {"a": "b"}, "prompt_cache_retention": "24h"},
    {"priority": 0.0, "cache_salt": None},
]
HARMLESS_CHATS: list[dict[str, Any]] = [
    {"prediction": {"type": "content", "content": "w5"}},
    {"modalities": ["text"]},
    {"verbosity": "medium"},
    {"reasoning_effort": "low"},
    {"add_generation_prompt": True, "continue_final_message": False},
    {"add_special_tokens": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"tools": []},
    {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": True}},
    {"messages": [{**USER, "mood": "good", "name": None, "audio": None, "annotations": [], "refusal": None}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "w5 w7", "cache_control": {"type": "x"}}]}]},
]


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[Running]:
    with serving(tiny_bundle, max_choices=8) as running:
        yield running


def text_of(response: Any) -> str:
    """The text of an answer, which may be a stream."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        return "".join(
            line.split('"content":"')[1].split('"')[0] for line in response.text.split("data:") if '"content":"' in line
        )
    choice = response.json()["choices"][0]
    found: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return found


@pytest.fixture(scope="module")
def plain(server: Running) -> dict[str, str]:
    """Answers to the bodies as they are."""
    bodies = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
    return {path: text_of(server.http.post(path, json=body)) for path, body in bodies.items()}


#: Paths and bodies with a change.
CHANGED = [("/v1/chat/completions", CHAT, change) for change in [*HARMLESS, *HARMLESS_CHATS]] + [
    ("/v1/completions", TEXT, change)
    for change in [*HARMLESS, {"suffix": ""}, {"suffix": None}, {"add_special_tokens": True}]
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("path", "body", "change"), CHANGED, ids=str)
def test_a_value_that_changes_nothing_is_accepted(
    server: Running, plain: Any, path: str, body: dict[str, Any], change: dict[str, Any]
) -> None:
    assert text_of(server.http.post(path, json=body | change)) == plain[path]


@pytest.mark.parametrize(
    ("path", "body", "kind"), [("/v1/chat/completions", CHAT, ChatBody), ("/v1/completions", TEXT, CompletionBody)]
)
def test_null_is_absent_in_every_field(server: Running, path: str, body: dict[str, Any], kind: Any) -> None:
    nulls = dict.fromkeys((field.alias or name for name, field in kind.model_fields.items()), None)
    assert text_of(server.http.post(path, json=nulls | body)) == text_of(server.http.post(path, json=body))


def test_messages_of_any_client_are_accepted(server: Running) -> None:
    call = {"id": "a", "index": 0, "type": "function", "function": {"name": "f", "arguments": {"a": 1}, "extra": 5}}
    for turn in (
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "reasoning_content": "w9", "tool_calls": None},
        {"role": "assistant", "content": "w6", "tool_calls": [call], "provider_specific_fields": {}},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
    ):
        body = CHAT | {"messages": [USER, turn, USER]}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200, turn


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (CHAT | {"n": 200}, "n", "found: 200"),
        (TEXT | {"prompt": ["w5"] * 9}, "prompt", "found: 9"),
        (TEXT | {"prompt": []}, "prompt", "number of prompts"),
        (CHAT | {"logprobs": True, "top_logprobs": 25}, "top_logprobs", "0 .. 20"),
        (CHAT | {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize is not a variable"),
    ],
)
def test_a_refusal_names_what_is_out_of_range(server: Running, body: dict[str, Any], param: str, said: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = server.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert said in response.json()["error"]["message"]


def test_chat_template_kwargs_precede_the_effort_and_the_recipe(tmp_path: Path) -> None:
    template = TEMPLATE + "{{ ' w9' if enable_thinking else '' }}{{ ' w8' if reasoning_effort == 'low' else '' }}"
    bundle = build_tiny(tmp_path, template=template, target={"path": "target", "template": {"enable_thinking": True}})
    with serving(bundle) as server:

        def prompt(**options: Any) -> int:
            body = {**CHAT, **options}
            tokens: int = server.http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
            return tokens

        assert prompt() == 5
        assert prompt(chat_template_kwargs={"enable_thinking": False}) == 4
        assert prompt(reasoning_effort="none") == 4
        assert prompt(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == 5
        assert prompt(reasoning_effort="low") == 6
        body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
        assert server.http.post("/tokenize", json=body).json()["count"] == 4


def test_every_argument_of_the_renderer_is_refused() -> None:
    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert set(arguments) - {"self", "kwargs", "documents"} <= TEMPLATE_ARGUMENTS  # documents are a variable
