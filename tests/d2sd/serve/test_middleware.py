"""How the server listens and logs, and what every request passes: clients that go, keys, other origins."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import sys
import threading
from pathlib import Path

import pytest

from d2sd.errors import D2SDError, GenerationError, RequestError
from d2sd.plugins import dispatch
from d2sd.serve.errors import Busy, QueueFull
from d2sd.serve.openai import run
from d2sd.serve.openai.errors import describe
from d2sd.serve.openai.middleware import access
from d2sd.serve.openai.run import listen
from tests.d2sd.serve.http import enter, serving

RESET = (
    ConnectionResetError(104, "Connection reset by peer"),
    BrokenPipeError(32, "Broken pipe"),
    RuntimeError("unable to perform operation on <TCPTransport closed=True reading=False 0x5>; the handler is closed"),
)


@pytest.mark.parametrize("error", RESET, ids=lambda error: type(error).__name__)
def test_a_client_that_resets_its_connection_is_no_error(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asyncio.run(enter("/v1/models", error=error))
    (line,) = caplog.records
    assert (line.levelno, json.loads(line.message)["status"]) == (logging.INFO, 499)


def test_a_bug_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(enter("/v1/models", error=RuntimeError("dictionary changed size during iteration")))
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize(
    ("path", "lines"),
    [*((path, 0) for path in ("/health", "/live", "/ready", "/metrics", "/", "/page.js", "/page.css")), ("/v1", 1)],
)
def test_probes_are_not_logged(path: str, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asyncio.run(enter(path))
    assert len(caplog.records) == lines


def test_web_pages_of_other_origins_may_use_the_server_where_it_says_so(tiny_bundle: Path) -> None:
    page = {"origin": "https://page.example"}
    asked = page | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with serving(tiny_bundle, api_keys=("secret",), origins=("https://page.example",)) as server:
        preflight = server.http.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        refused = server.http.get("/v1/models", headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
        found = server.http.get("/v1/models", headers=page | {"authorization": "Bearer secret"})
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "https://page.example")
        assert "x-request-id" in found.headers["access-control-expose-headers"]
        other = server.http.options("/v1/models", headers=asked | {"origin": "https://other.example"})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)


def test_no_origin_is_allowed_by_default(tiny_bundle: Path) -> None:
    with serving(tiny_bundle) as server:
        found = server.http.get("/v1/models", headers={"origin": "https://page.example"})
        assert "access-control-allow-origin" not in found.headers
        asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
        assert server.http.options("/v1/models", headers=asked).status_code == 405


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("is wrong"), 400, "invalid_request"),
        (GenerationError("cannot go on"), 400, "generation_failed"),
        (D2SDError("is not installed", fix="pip install it"), 501, "not_supported"),
        (QueueFull("is full"), 429, "queue_full"),
        (Busy("waits"), 503, "busy"),
        (GenerationError.of(KeyError("x")), 500, "internal_error"),
    ],
    ids=str,
)
def test_an_error_of_ours_keeps_its_text(error: D2SDError, status: int, code: str) -> None:
    found, body, headers = describe(error)
    assert (found, body["error"]["code"]) == (status, code)
    assert body["error"]["message"] == str(error)
    assert ("retry-after" in headers) == (status in (429, 503))


def test_what_is_not_installed_is_said_to_the_client(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise D2SDError("Structured output needs llguidance.", fix="pip install 'd2sd[structured]'")

    monkeypatch.setattr("d2sd.runtime.grammar.guidance.require", missing)
    with serving(tiny_bundle) as server:
        body = {"prompt": "w5", "response_format": {"type": "json_object"}}
        response = server.http.post("/v1/completions", json=body)
        assert response.status_code == 501
        assert "pip install 'd2sd[structured]'" in response.json()["error"]["message"]


def test_a_second_server_is_refused_while_the_first_loads_and_clients_wait() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(D2SDError, match="already in use") as caught:
            listen("127.0.0.1", port)
        assert caught.value.fix == "choose another --port"
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(b"waits")
            connection, _ = first.accept()
            assert connection.recv(5) == b"waits"
            connection.close()


@pytest.mark.parametrize("host", ["999.1.1.1", "..", "a" * 70, "192.0.2.1", "fe80::g"])
def test_an_address_that_is_none_blames_the_host(host: str) -> None:
    with pytest.raises(D2SDError) as caught:
        listen(host, 0)
    assert "--host" in str(caught.value.fix)
    assert "--port" not in str(caught.value.fix)


def test_a_path_adds_no_line_to_the_log() -> None:
    facts = {"method": "GET", "path": "/a\n12:00:00 INFO forged \x1b[31m", "status": 404, "seconds": 0.5}
    record = logging.LogRecord(access.name, logging.INFO, "", 1, json.dumps(facts), None, None)
    line = run._TextLines("%(message)s").format(record)
    assert line == "GET /a 12:00:00 INFO forged \N{REPLACEMENT CHARACTER}[31m 404, 0.50 s"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="not Linux")
def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_UNREAD", 1)
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        connection, _ = listener.accept()
        ended = threading.Event()

        def send() -> None:
            try:
                while True:
                    connection.sendall(b"x" * 100_000)
            except OSError:
                ended.set()

        threading.Thread(target=send, daemon=True).start()
        assert ended.wait(60), "the server would keep what it has to send for ever"
        connection.close()
        client.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_logs_are_text_on_a_terminal_and_json_elsewhere(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    loggers = [logging.getLogger(name) for name in ("d2sd", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    try:
        run._log_to_stderr()
        facts = {"method": "GET", "path": "/\x1b[2J", "status": 200, "completion_tokens": 5, "seconds": 0.25}
        access.info(json.dumps(facts))
        logging.getLogger("d2sd.serve").warning("some %s", "words")
        dispatch._warn_once.__wrapped__("attention", "head size 8")
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    first, second, third = stream.getvalue().splitlines()
    slower = "attention runs as plain PyTorch on this GPU: head size 8"
    if terminal:
        assert first.endswith("INFO GET /\N{REPLACEMENT CHARACTER}[2J 200, 5 tokens, 0.25 s")
        assert second.endswith("WARNING some words")
        assert third.endswith(f"WARNING {slower}")
    else:
        assert json.loads(first).items() >= ({"event": "request"} | facts).items()
        assert json.loads(second)["message"] == "some words"
        assert json.loads(third).items() >= {"level": "warning", "message": slower}.items()
