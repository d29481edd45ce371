"""How a server begins and ends: names that it answers to, signals, the drain that probes see."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from d2sd.bundle.load import load_bundle
from d2sd.bundle.options import EngineOptions
from d2sd.bundle.serving import make_engine
from d2sd.errors import BundleError
from d2sd.serve import async_engine
from d2sd.serve.openai import run
from d2sd.serve.openai.run import DrainingServer, serve_bundle
from d2sd.serve.openai.settings import ServerSettings
from tests.d2sd.serve.engines import Held
from tests.d2sd.serve.http import enter, serving, wait_until
from tests.d2sd.serve.test_refusals import TEXT, connect


@pytest.mark.parametrize("hurried", [False, True])
def test_while_it_drains_the_port_is_open_and_the_server_is_not_ready(
    tiny_bundle: Path, hurried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "_LAST_STEP", 0.1)
    held = Held(make_engine(load_bundle(tiny_bundle)))
    with serving(tiny_bundle, held.engine) as server:
        uvicorn_server: DrainingServer = server.app.state.uvicorn
        client = connect(server, TEXT | {"max_tokens": 30, "stream": True})
        wait_until(lambda: server.service.live == 1)
        uvicorn_server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: not server.service.accepting)
        with httpx.Client(base_url=server.url) as fresh:  # a new connection
            assert fresh.get("/ready").status_code == 503
            assert fresh.get("/live").status_code == 200
            refused = fresh.post("/v1/completions", json=TEXT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"]
        if hurried:
            uvicorn_server.handle_exit(signal.SIGINT, None)
            wait_until(lambda: uvicorn_server.force_exit is False)  # it has been taken
        held.open.set()
        client.settimeout(10)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += client.recv(9999)
        client.close()
        assert (b"shutting_down" in answer) == hurried
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", int(server.url[-5:]))):
        pass


def test_a_second_interrupt_ends_the_drain_and_nothing_is_raised_again() -> None:
    def usual() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]

    before = usual()
    for sent, forced in (
        ([signal.SIGTERM], False),
        ([signal.SIGHUP], False),
        ([signal.SIGTERM, signal.SIGHUP, signal.SIGTERM], False),
        ([signal.SIGTERM, signal.SIGINT], True),
        ([signal.SIGINT, signal.SIGINT], True),
    ):
        server = DrainingServer(uvicorn.Config(lambda: None), SimpleNamespace())  # type: ignore[arg-type]
        with server.capture_signals():
            for number in sent:
                signal.raise_signal(number)
        assert (server.should_exit, server.force_exit, server.ended_by) == (True, forced, sent[0])
        assert usual() == before


def test_under_nohup_the_end_of_the_terminal_is_ignored() -> None:
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with run.on_signals(lambda *_: pytest.fail("SIGHUP was not ignored")):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, usual)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Serve a bundle, with the logs of these tests."""
    monkeypatch.setattr(run, "_log_to_stderr", lambda: None)
    monkeypatch.setattr("gc.freeze", lambda: None)
    return lambda bundle: serve_bundle(bundle, ServerSettings(model=""), "127.0.0.1", 0, EngineOptions())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_bundle_is_loaded_ends_it_with_zero(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, begin: Callable[[Path], None]
) -> None:
    usual = signal.getsignal(number)
    monkeypatch.setattr("d2sd.bundle.load.load_bundle", lambda *arguments, **options: signal.raise_signal(number))
    with pytest.raises(SystemExit) as ended:
        begin(tiny_bundle)
    assert ended.value.code == 0
    assert signal.getsignal(number) is usual


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_signal_decides_how_a_drained_server_ends(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, begin: Callable[[Path], None]
) -> None:
    def serve(self: DrainingServer, sockets: list[socket.socket]) -> None:
        with self.capture_signals():
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(DrainingServer, "run", serve)
    if number is signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            begin(tiny_bundle)
    else:
        begin(tiny_bundle)


def test_nothing_is_announced_of_what_is_no_bundle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begin: Callable[[Path], None]
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(BundleError, match="Not a bundle"):
        begin(tmp_path)
    assert caplog.records == []


LOCAL = ("localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1", "127.0.0.1:80", "[::1]:8000", "10.1.2.3:5", "")
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "[::1",
    "a:b:c",
    "x",
)


def status_for(host: str, hosts: tuple[str, ...], path: str = "/v1/models") -> int:
    """The status of a request whose Host header is this."""
    status, text = asyncio.run(enter(path, host=host, hosts=hosts))
    body = json.loads(text)
    assert body == {} if status == 200 else body["error"]["code"] == "host_not_allowed"
    return status


@pytest.mark.parametrize("host", LOCAL)
def test_a_local_server_answers_to_its_own_names(host: str) -> None:
    assert status_for(host, ("localhost", "127.0.0.1")) == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics", "/health"])
@pytest.mark.parametrize("host", FOREIGN)
def test_a_page_that_gives_its_name_a_local_address_reads_nothing(host: str, path: str) -> None:
    assert status_for(host, ("localhost", "127.0.0.1"), path) == 403
    assert status_for(host, (), path) == 200, "a server that says nothing about names has any"
    assert status_for("Box.Example:81", ("box.example.",), path) == 200


@pytest.mark.parametrize(
    ("address", "settings", "hosts"),
    [
        ("127.0.0.1", {}, ("localhost", "name")),
        ("127.8.9.1", {"hosts": ("box",)}, ("localhost", "name", "box")),
        ("::1", {}, ("localhost", "name")),
        ("fe80::1%eth0", {}, ()),
        ("0.0.0.0", {}, ()),
        ("::", {}, ()),
        ("10.0.0.5", {"hosts": ("box",)}, ("localhost", "name", "box")),
        ("127.0.0.1", {"api_keys": ("k",)}, ()),
        ("127.0.0.1", {"api_keys": ("k",), "hosts": ("box",)}, ("localhost", "name", "box")),
    ],
)
def test_names_are_checked_on_loopback_without_keys_or_where_they_are_listed(
    address: str, settings: dict[str, Any], hosts: tuple[str, ...]
) -> None:
    assert run._checking_hosts(ServerSettings(model="m", **settings), "name", address).hosts == hosts
