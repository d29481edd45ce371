"""Requests that no context can hold are refused before the tokenizer, the engine or a type check works on them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from d2sd.serve.openai import bounds as module
from d2sd.serve.openai.bounds import least_values
from d2sd.serve.openai.protocol import ChatBody, CompletionBody
from tests.d2sd.serve.http import Running, serving, wait_until
from tests.d2sd.serve.test_refusals import connect, is_error

#: The tiny bundle has 64 tokens of at most 16 characters.
LONG = "w5 " * 342
USER = {"role": "user", "content": "w5"}


class Tokenizer:
    """A tokenizer that counts its calls, and waits while `open` is not set."""

    def __init__(self, made: Any) -> None:
        self._made, self.calls, self.open = made, 0, Event()
        self.open.set()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        assert self.open.wait(10)
        return self._made(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        self.calls += name == "apply_chat_template"
        return getattr(self._made, name)


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[tuple[Running, Tokenizer]]:
    with serving(tiny_bundle, max_choices=8, max_logprobs=70, max_waiting=2, max_body=8 << 20) as running:
        bundle = running.app.state.server.bundle
        object.__setattr__(bundle, "tokenizer", Tokenizer(bundle.tokenizer))
        yield running, bundle.tokenizer


TOO_MUCH: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": ["w5", LONG]}, "prompt"),
    ("/v1/completions", {"prompt": [5] * 65}, "prompt"),
    ("/v1/completions", {"prompt": [[5], [5] * 65]}, "prompt"),
    ("/v1/completions", {"prompt": ["w5"] * 9}, "prompt"),
    ("/v1/completions", {"prompt": [[5]] * 9}, "prompt"),
    ("/v1/completions", {"prompt": "w5", "stop": LONG}, "stop"),
    ("/v1/completions", {"prompt": "w5", "stop": ["w5" * 200] * 3}, "stop"),
    ("/v1/completions", {"prompt": "w5", "bad_words": [LONG]}, "bad_words"),
    ("/v1/completions", {"prompt": "w5", "bad_words": ["a"] * 1025}, "bad_words"),
    ("/v1/chat/completions", {"messages": [USER | {"content": LONG}]}, "messages"),
    ("/v1/chat/completions", {"messages": [USER | {"content": "w5 " * 20}] * 20}, "messages"),
    ("/v1/chat/completions", {"messages": [USER] * 65}, "messages"),
    ("/v1/chat/completions", {"messages": [USER | {"content": [{"type": "text", "text": ""}] * 65}]}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": LONG}}]},
        "messages",
    ),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/tokenize", {"messages": [USER | {"content": LONG}]}, "messages"),
    ("/detokenize", {"tokens": [5] * 65}, "tokens"),
    ("/trace", {"messages": [USER | {"content": LONG}]}, "messages"),
]


@pytest.mark.parametrize("number", range(len(TOO_MUCH)))
def test_what_cannot_fit_is_refused_without_the_tokenizer(server: tuple[Running, Tokenizer], number: int) -> None:
    running, tokenizer = server
    path, body, param = TOO_MUCH[number]
    before = tokenizer.calls
    error = is_error(running.http.post(path, json=body), 400)
    several = param == "prompt" and len(body["prompt"]) == 9  # or strings to stop at: a shorter history is no help
    code = "invalid_request" if several or param in ("stop", "bad_words") else "context_length_exceeded"
    assert (error["code"], error["param"]) == (code, param)
    assert ("maximum context length" in error["message"]) == (code == "context_length_exceeded")
    assert tokenizer.calls == before


def test_what_just_fits_is_not(server: tuple[Running, Tokenizer]) -> None:
    running, _ = server
    assert running.http.post("/tokenize", json={"prompt": LONG[:1024]}).json()["count"] > 64
    assert is_error(running.http.post("/v1/completions", json={"prompt": LONG[:1024]}), 400)["param"] == "prompt"
    words = {"prompt": "w5", "bad_words": [f"w{n}" for n in range(6, 60)], "stop": ["x" * 400] * 2, "max_tokens": 1}
    assert running.http.post("/v1/completions", json=words).status_code == 200


def test_prompt_logprobs_are_bounded_over_all_answers(server: tuple[Running, Tokenizer]) -> None:
    running, _ = server
    body = {"prompt": ["w5 " * 12] * 3, "n": 2, "max_tokens": 1, "prompt_logprobs": 1}
    error = is_error(running.http.post("/v1/completions", json=body), 400)
    assert error["param"] == "prompt_logprobs"
    assert "72 of prompts and 0 of 6 answers" in error["message"]
    assert running.http.post("/v1/completions", json=body | {"prompt": ["w5 " * 11] * 3}).status_code == 200
    assert running.http.post("/v1/completions", json=body | {"prompt": "w5 " * 35}).status_code == 200
    del body["prompt_logprobs"]
    assert running.http.post("/v1/completions", json=body).status_code == 200
    body |= {"logprobs": 1, "prompt": "w5"}
    assert running.http.post("/v1/completions", json=body | {"max_tokens": 35}).status_code == 200
    assert is_error(running.http.post("/v1/completions", json=body | {"max_tokens": 36}), 400)["param"] == "logprobs"


def test_nobody_goes_first_by_its_own_wish(server: tuple[Running, Tokenizer]) -> None:
    running, _ = server
    for priority in (-1, 1):
        body = {"prompt": "w5", "max_tokens": 1, "priority": priority}
        assert is_error(running.http.post("/v1/completions", json=body), 400)["param"] == "priority"
    server_settings = running.server.settings
    object.__setattr__(server_settings, "priorities", True)
    assert running.http.post("/v1/completions", json=body).status_code == 200
    object.__setattr__(server_settings, "priorities", False)


@pytest.mark.slow
def test_a_client_with_many_answers_keeps_no_other_waiting(tiny_bundle: Path) -> None:
    with serving(tiny_bundle, api_keys=("a", "b"), max_waiting=8, max_choices=64) as running:

        async def ask(key: str, n: int) -> float:
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
                body = {"prompt": "w5", "max_tokens": 40, "ignore_eos": True, "n": n}
                answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            return time.monotonic()

        async def both() -> tuple[float, float]:
            many = asyncio.ensure_future(ask("a", 8 + running.engine.limits.max_batch))  # the queue is full
            while not running.engine.scheduler.waiting:
                await asyncio.sleep(0.001)
            return await ask("b", 1), await many

        one, many = asyncio.run(both())
        assert one < many


def test_a_large_response_is_the_same_as_a_small_one(
    server: tuple[Running, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _ = server
    body = {"prompt": ["w5 w7"] * 2, "logprobs": 3, "prompt_logprobs": 2, "max_tokens": 4, "seed": 1}
    small = running.http.post("/v1/completions", json=body).json()
    monkeypatch.setattr("d2sd.serve.openai.app._LARGE", 1)
    large = running.http.post("/v1/completions", json=body).json()
    assert large["choices"] == small["choices"]
    assert len(large["choices"][0]["prompt_logprobs"]) == 2


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "w5", "stop": [1] * 200_000},
        {"messages": [{}] * 200_000},
        {"prompt": "w5", "logit_bias": {str(n): None for n in range(20_000)}},
        {"prompt": [[[5]] * 100] * 1300},
        {f"field{n}": 1 for n in range(300)},
        [1] * 200_000,
    ],
    ids=range(6),
)
def test_a_body_of_very_many_values_is_refused_before_their_types_are_checked(
    server: tuple[Running, Tokenizer], body: Any
) -> None:
    running, _ = server
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/trace"):
        error = is_error(running.http.post(path, content=data, headers=headers), 400)
        assert "too many values" in error["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": [1] * 9},
        {"bad_words": [1] * 9},
        {"stop_token_ids": [-1] * 9},
        {"messages": [{}] * 9},
        {"messages": [USER | {"content": [1] * 9}]},
        {"structured_outputs": {"choice": [1] * 9}},
    ],
    ids=str,
)
def test_checking_types_ends_at_the_first_wrong_element(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"messages": [USER]} | wrong)
    assert len(caught.value.errors()) < 9
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": [[-1]] * 9})
    assert len(caught.value.errors()) < 9


def test_prompts_are_bounded_together(server: tuple[Running, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    running, tokenizer = server
    monkeypatch.setattr(module, "_PROMPTS", 10)
    before = tokenizer.calls
    body = {"prompt": ["w5 " * 200] * 2, "max_tokens": 1}
    assert "together" in is_error(running.http.post("/v1/completions", json=body), 400)["message"]
    assert tokenizer.calls == before


def test_counting_ends_at_the_bound() -> None:
    seen = 0

    class Counted(list[Any]):
        def __len__(self) -> int:
            nonlocal seen
            seen += 1
            return super().__len__()

    assert module._has_more(Counted([Counted([1] * 10)] * 1000), 1500)
    assert seen < 110
    assert not module._has_more({"a": [1, {"b": 2}], "c": "d" * 100}, 5)


def test_a_deadline_counts_the_wait_for_the_tokenizer(server: tuple[Running, Tokenizer]) -> None:
    running, tokenizer = server
    tokenizer.open.clear()
    try:
        response = running.http.post("/v1/completions", json={"prompt": "w5", "deadline": 0.05})
    finally:
        tokenizer.open.set()
    assert is_error(response, 504)["code"] == "deadline_exceeded"
    assert running.http.post("/v1/completions", json={"prompt": "w5", "max_tokens": 1}).status_code == 200


def test_a_full_tokenizer_refuses_and_forgets_clients_that_have_gone(server: tuple[Running, Tokenizer]) -> None:
    """The tiny engine takes 8, and 2 may wait: so 11 requests have a place, one of them with the tokenizer."""
    running, tokenizer = server
    tokenizer.open.clear()
    before = tokenizer.calls
    clients = [connect(running, {"prompt": "w5", "max_tokens": 1})]
    wait_until(lambda: tokenizer.calls == before + 1)
    clients += [connect(running, {"prompt": "w5", "max_tokens": 1}) for _ in range(10)]
    waiting = running.app.state.server._text._waiting
    wait_until(lambda: sum(map(len, waiting.values())) == 10)
    response = running.http.post("/v1/completions", json={"prompt": "w5"})
    assert is_error(response, 429)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) > 0
    assert running.http.get("/health").status_code == 200
    for client in clients:
        client.close()
    wait_until(lambda: not waiting)
    tokenizer.open.set()
    time.sleep(0.05)
    assert tokenizer.calls == before + 1
    assert running.http.post("/v1/completions", json={"prompt": "w5", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"prompt": 'a, b, [c], \\, ", ' * 99}, 1),  # commas of text are no values
        ({"prompt": ["\\", ",", '\\"', ',"'] * 25}, 100),
        ({"tokens": [[]] * 100}, 100),
        ({f"k{n}": "," for n in range(100)}, 100),
    ],
    ids=("text", "escapes", "lists", "fields"),
)
def test_values_are_counted_before_a_body_is_read(body: dict[str, Any], count: int) -> None:
    data = json.dumps(body).encode()
    assert least_values(data, 10) <= count
    assert (least_values(data, 10) > 10) == (count > 10)
