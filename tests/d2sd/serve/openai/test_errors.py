"""Refusals that clients recognise by their code, and that speak the caller's language."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.d2sd.serve.http import Running, wait_until

#: Routes, a body with `count` words of prompt, and what the route calls its prompt and the length of an answer.
ROUTES: dict[str, tuple[Any, str, str]] = {
    "/v1/chat/completions": (
        lambda count: {"messages": [{"role": "user", "content": "w5 " * count}]},
        "messages",
        "max_tokens",
    ),
    "/trace": (lambda count: {"messages": [{"role": "user", "content": "w5 " * count}]}, "messages", "max_tokens"),
    "/v1/completions": (lambda count: {"prompt": "w5 " * count}, "prompt", "max_tokens"),
    "/v1/responses": (lambda count: {"input": "w5 " * count}, "input", "max_output_tokens"),
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("words", "length"),
    [(64, None), (70, 2), (2000, None), (90_000, 1), (3, 62), (40, 10_000_000)],
    ids=["full", "long", "longer", "far too long", "answer", "far too long answer"],
)
def test_what_exceeds_the_context_is_recognised(server: Running, path: str, words: int, length: int | None) -> None:
    body, prompt, answer = ROUTES[path]
    response = server.http.post(path, json=body(words) | ({} if length is None else {answer: length}))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is 64 tokens. However, you ")
    assert error["param"] == (prompt if words >= 64 else answer)
    for foreign in ("max_new_tokens", "recipe", "--", "{", "LLM"):
        assert foreign not in error["message"]
    if words < 64:
        assert f"in the {prompt}, {length} in the completion" in error["message"]
        assert f"shorten the {prompt} or lower {answer}\n" in error["message"] + "\n"


def test_an_answer_that_is_left_open_shrinks_to_the_context(server: Running) -> None:
    found = server.openai.completions.create(model="tiny", prompt=[5] * 60, extra_body={"ignore_eos": True})
    assert found.usage is not None
    assert found.usage.completion_tokens == 4
    assert server.http.post("/v1/completions", json={"prompt": [5] * 60, "max_tokens": 5}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_template_that_fails_names_what_the_client_can_do(server: Running, path: str) -> None:
    turns = [{"role": "user", "content": "w5"}] * 2  # the template refuses two turns of one role
    error = server.http.post(path, json={("input" if "responses" in path else "messages"): turns}).json()["error"]
    assert "/v1/completions" in error["message"]
    assert "--raw" not in error["message"]


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "images"),
        ({"type": "input_image", "image_url": "https://example.com/a.png"}, "images"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audios"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "videos"),
        ({"type": "input_file", "file_id": "f"}, "files"),
        ({"type": "file", "file": {"file_id": "f"}}, "files"),
        ({"type": "refusal", "refusal": "no"}, "parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["type"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_what_is_not_text_is_refused_by_what_it_is(server: Running, path: str, part: dict[str, Any], what: str) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "w5"}, part]}]
    field = "input" if "responses" in path else "messages"
    response = server.http.post(path, json={field: turns})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, f"{field}.0.content")
    assert f"{what} are not supported, only text" in error["message"]
    assert "found" not in error["message"], "a picture would be quoted"


def test_the_schema_promises_no_status_that_is_never_sent(server: Running) -> None:
    routes = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/ready"} <= routes.keys()
    statuses = {status for route in routes.values() for method in route.values() for status in method["responses"]}
    assert statuses == {"200", "4XX"}


def test_a_trace_is_logged_as_the_stream_that_it_is(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "d2sd.serve.access")
    body = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 2}
    for path, streams in (("/trace", True), ("/v1/chat/completions", False)):
        caplog.clear()
        assert server.http.post(path, json=body).status_code == 200
        wait_until(lambda: caplog.records)
        assert json.loads(caplog.records[0].message)["stream"] is streams
