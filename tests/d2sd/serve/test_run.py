"""How the server listens and logs."""

from __future__ import annotations

import io
import json
import logging
import socket
import sys
import threading

import pytest

from d2sd.errors import D2SDError
from d2sd.serve.openai import run
from d2sd.serve.openai.middleware import access
from d2sd.serve.openai.run import listen


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
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    first, second = stream.getvalue().splitlines()
    if terminal:
        assert first.endswith("INFO GET /\N{REPLACEMENT CHARACTER}[2J 200, 5 tokens, 0.25 s")
        assert second.endswith("WARNING some words")
    else:
        assert json.loads(first).items() >= ({"event": "request"} | facts).items()
        assert json.loads(second)["message"] == "some words"
