"""Whatever a client sends, it gets an answer or OpenAI's error body; the server goes on."""

from __future__ import annotations

import json
import random
import socket
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import make_engine
from tests.d2sd.serve.engines import Held
from tests.d2sd.serve.http import Running, serving, wait_until

USER: Any = {"role": "user", "content": "w5 w7"}
CHAT = {"messages": [USER], "max_tokens": 2}
TEXT = {"prompt": "w5 w7", "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[Running]:
    with serving(tiny_bundle, max_body=20_000, max_choices=8) as running:
        yield running


def is_error(response: Any, status: int) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's body."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in response.text
    error: dict[str, Any] = body["error"]
    return error


#: Changes to a good body, and the parameter that the refusal names.
BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "w5"}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [None]}, "messages.0"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"messages": [{"role": "king", "content": "w5"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": {"text": "w5"}}]}, "messages.0.content"),
    ({"messages": [USER, USER]}, "tiny: chat_template"),
    ({"messages": [{**USER, "audio": {"id": "a"}}]}, "messages.0.audio"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content",
    ),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "content"),
    ({"model": "gpt-5"}, "model"),
    ({"model": 5}, "model"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [0.5]}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "5"}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 9}, "n"),
    ({"max_tokens": 61}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"stop": [5]}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"deadline": 0}, "deadline"),
    ({"functions": []}, "functions"),
    ({"audio": {}}, "audio"),
    ({"best_of": 2}, "best_of"),
    ({"": 5}, None),
    ({"x" * 5000: 5}, "xxx"),
    ({"user": 5}, "user"),
    ({"frequency_penalty": "high"}, "frequency_penalty"),
    ({"logit_bias": {"w5": 1}}, "logit_bias"),
    ({"logit_bias": {"64": 1}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"bad_words": "w5"}, "bad_words"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"function_call": "auto"}, "function_call"),
    ({"messages": [{"role": "assistant", "content": "w5", "tool_calls": [{"id": "a"}]}]}, "messages.0.tool_calls.0"),
]


@pytest.mark.parametrize("number", range(len(BAD_CHATS)))
def test_a_wrong_field_is_refused_by_its_name(server: Running, number: int) -> None:
    change, param = BAD_CHATS[number]
    stream = {"stream": True} if number % 2 and "stream_options" not in change else {}
    body = json.dumps(CHAT | stream | change)
    response = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    error = is_error(response, 404 if change.get("model") == "gpt-5" else 400)
    if param is not None:
        assert error["param"] is not None
        assert param in error["param"]
    assert len(response.content) < 2000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b'{"messages": [',
        b"\xff\xfe",
        b'{"a":' * 3000,
        b"[" * 15000,
        b'{"max_tokens": ' + b"9" * 6000 + b"}",
        b'{"messages": NaN}',
        b"a=b",
        '{"prompt": "\u00e9'.encode("utf-16"),
    ],
    ids=range(14),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_object_is_refused(server: Running, body: bytes, path: str) -> None:
    is_error(server.http.post(path, content=body, headers={"content-type": "application/json"}), 400)
    is_error(server.http.post(path, content=body), 400)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": None},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ""},
        {"prompt": [5, "w5"]},
        {"prompt": [-1]},
        {"prompt": [64]},
        {"prompt": [[5], [10**30]]},
        {"prompt": [5.0]},
        {"prompt": [True]},
        {"prompt": ["w5"] * 9},
        {"prompt": ["w5", ""]},
        {"prompt": "w5 " * 70},
        {"prompt": "\ud800"},
        {"echo": 1},
        {"suffix": "x"},
        {"messages": [USER]},
        {"max_tokens": 0},
        {"echo": True, "logprobs": 1, "stream": True},
        {"echo": True, "logprobs": 1, "prompt_logprobs": 1},
        {"echo": True, "logprobs": 21},
        {"echo": True, "max_tokens": -1},
        {"echo": True, "prompt": [64], "max_tokens": 0},
        {"echo": True, "prompt": [10**30]},
        {"echo": True, "prompt": []},
    ],
    ids=range(25),
)
def test_a_wrong_prompt_is_refused(server: Running, change: dict[str, Any]) -> None:
    body = json.dumps(TEXT | change)
    is_error(server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"}), 400)
    assert server.service.live == 0


def test_an_answer_that_cannot_be_formed_leaves_the_engine(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = server.engine.step, list[int]()

    def slow_step() -> Any:
        steps.append(1)
        time.sleep(0.05)
        return step()

    def fail(*args: object) -> None:
        raise KeyError("form")

    monkeypatch.setattr(server.engine, "step", slow_step)
    monkeypatch.setattr("d2sd.serve.openai.app.ChatFormat", fail)
    is_error(server.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 50, "ignore_eos": True}), 500)
    wait_until(lambda: not server.service.live)
    assert len(steps) < 10


def test_paths_and_methods(server: Running) -> None:
    for path in ("/v1", "/v1/embeddings", "/v1/chat/completions/", "/%ff", "/docs", "/../etc/passwd"):
        assert is_error(server.http.get(path), 404)["code"] == "not_found"
    for method, path in (("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/health")):
        assert is_error(server.http.request(method, path), 405)["code"] == "method_not_allowed"
    is_error(server.http.post("/tokenize", json={}), 400)
    is_error(server.http.post("/tokenize", json={"prompt": "w5", "messages": [USER]}), 400)
    is_error(server.http.post("/detokenize", json={"tokens": [64]}), 400)


def test_large_bodies_are_refused_with_and_without_a_length(server: Running) -> None:
    large = json.dumps({"prompt": "w5 " * 10_000}).encode()
    assert is_error(server.http.post("/v1/completions", content=large), 413)["code"] == "body_too_large"

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    begun = time.monotonic()
    is_error(server.http.post("/v1/completions", content=pieces(), headers={"content-type": "application/json"}), 413)
    assert time.monotonic() - begun < 4, "it does not wait for more of a body that has ended"
    assert server.http.get("/health").json() == {"status": "ok"}


def test_a_client_that_sends_a_large_body_first_can_read_the_refusal(server: Running) -> None:
    client = connect(server, {"prompt": "w5 " * 6_000_000})  # raises if the connection is closed before all is sent
    client.settimeout(10)
    assert client.recv(64).startswith(b"HTTP/1.1 413 ")
    client.close()


def test_the_client_raises_openais_errors(server: Running) -> None:
    create: Any = server.openai.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="temperature out of range") as raised:
        create(model="tiny", messages=[USER], temperature=-1)
    assert (raised.value.param, raised.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match=r"Unsupported parameter\(s\): `colour`, `taste`"):
        create(model="tiny", messages=[USER], extra_body={"colour": 1, "taste": 2})
    with pytest.raises(openai.NotFoundError):
        create(model="gpt", messages=[USER])


def test_keys(tiny_bundle: Path) -> None:
    with serving(tiny_bundle, api_keys=("secret", "other")) as server:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Basic secret"},
            {"authorization": "Bearer"},
        ):
            for path in ("/v1/models", "/metrics", "/version", "/tokenize", "/nothing", "/v1/chat/completions"):
                error = is_error(server.http.get(path, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
        for key in ("secret", "other"):
            headers = {"authorization": f"Bearer {key}"}
            assert server.http.get("/v1/models", headers=headers).status_code == 200
        for path in ("/health", "/live", "/ready"):
            assert server.http.get(path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.openai.models.list()


def connect(server: Running, body: dict[str, Any]) -> socket.socket:
    """A client that sends a request and leaves its answer unread."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    client.sendall(head.encode() + b"\r\n\r\n" + data)
    return client


def test_disconnected_clients_free_their_places_and_full_queues_refuse(tiny_bundle: Path) -> None:
    held = Held(make_engine(load_bundle(tiny_bundle)))
    with serving(tiny_bundle, held.engine, max_waiting=2) as server:
        clients = [connect(server, TEXT | {"max_tokens": 50, "stream": number % 2 == 1}) for number in range(4)]
        wait_until(lambda: server.service.live == 4)
        error = is_error(response := server.http.post("/v1/completions", json=TEXT), 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert response.headers["retry-after"] == "1"
        for client in clients:
            client.close()
        time.sleep(0.1)
        held.open.set()
        wait_until(lambda: server.service.live == 0)
        assert server.http.post("/v1/completions", json=TEXT).status_code == 200
        assert not held.engine.busy
        text = server.http.get("/metrics").text
        assert 'd2sd_request_success_total{finished_reason="cancelled",model_name="tiny"} 4.0' in text


def test_deadlines_and_a_failed_engine(tiny_bundle: Path) -> None:
    held = Held(make_engine(load_bundle(tiny_bundle)))
    with serving(tiny_bundle, held.engine, request_timeout=5.0) as server:
        client = connect(server, TEXT | {"deadline": 0.5, "stream": True})
        time.sleep(0.6)
        held.open.set()
        wait_until(lambda: server.service.live == 0)
        client.settimeout(5)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += client.recv(9999)
        event = next(line for line in answer.split(b"\r\n") if b"error" in line)
        assert json.loads(event.strip().removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
        assert b"[DONE]" in answer
        client.close()
        held.step = lambda: 1 / 0  # type: ignore[assignment, return-value]
        assert is_error(server.http.post("/v1/completions", json=TEXT), 503)["code"] == "engine_failed"
        assert is_error(server.http.post("/v1/completions", json=TEXT), 503)["type"] == "server_error"
        for path in ("/health", "/live", "/ready"):
            assert server.http.get(path).status_code == 503
        assert "ZeroDivisionError" in server.http.get("/health").json()["reason"]


FIELDS = """messages prompt temperature n seed stop stream max_tokens top_k model deadline stream_options user logprobs
tools response_format logit_bias"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_random_bodies(server: Running) -> None:
    generator, names = random.Random(5), FIELDS.split()

    def value(depth: int = 0) -> Any:
        kind = generator.randrange(11)
        if kind > 7 and depth < 3:
            if kind == 8:
                return {generator.choice([*names, "role", "content", "type"]): value(depth + 1) for _ in range(3)}
            return [value(depth + 1) for _ in range(generator.randrange(4))]
        return [None, True, -1, 0, 10**20, 1e300, "w5 w7", "".join(generator.choices(string.printable, k=20))][kind % 8]

    seen = set()
    for number in range(1000):
        fields = {generator.choice(names): value() for _ in range(generator.randrange(5))}
        data = json.dumps((generator.choice([CHAT, TEXT, {}])) | fields).encode()
        if generator.random() < 0.2:
            cut = generator.randrange(len(data))
            data = data[:cut] + generator.randbytes(generator.randrange(3)) + data[cut + generator.randrange(9) :]
        path = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"][number % 4]
        response = server.http.post(path, content=data, headers={"content-type": "application/json"})
        seen.add(response.status_code)
        if response.status_code != 200:
            assert response.status_code < 500, data
            is_error(response, response.status_code)
    assert {200, 400} <= seen
    wait_until(lambda: server.service.live == 0)
    assert server.http.get("/health").status_code == 200
