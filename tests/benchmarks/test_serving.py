"""The serving benchmark: figures of known arrivals, and loads against a server of a tiny bundle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.load.answers import check_answers
from benchmarks.load.client import Reply
from benchmarks.load.dynamo import DynamoClient
from benchmarks.load.figures import Figures, Sample, Slo
from benchmarks.load.plots import write_plots
from benchmarks.load.report import markdown
from benchmarks.load.result import Cell, Key, Result, Run, Variant
from benchmarks.load.server import Server, family
from benchmarks.load.workloads import single
from d2sd.bench.provenance import provenance
from d2sd.errors import D2SDError
from d2sd.serve.openai.run import listen
from tests.d2sd.serve.conftest import build_tiny
from tests.d2sd.serve.http import Running, serving

SLO = Slo(ttft=0.15, itl=0.05)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = {"max_batch": 4, "max_context": 256, "page_size": 4}
    return build_tiny(tmp_path_factory.mktemp("serving"), limits=limits)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    with serving(bundle, max_waiting=4, max_body=1 << 14) as running:
        yield running


def reply(arrivals: list[tuple[float, int]], end: float, cached: int = 0) -> Reply:
    count = sum(tokens for _, tokens in arrivals)
    usage = {
        "prompt_tokens": 10,
        "completion_tokens_details": {"accepted_prediction_tokens": count // 2},
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return Reply(200, arrivals, end, "text", list(range(count)), "length", usage)


# -- figures -----------------------------------------------------------------------------------------------------------


def test_latencies_are_of_tokens_not_of_chunks() -> None:
    sample = Sample.of(reply([(0.1, 2), (0.2, 1), (0.5, 3)], 0.6, cached=4))
    assert sample.ttft == 0.1
    assert sample.itl == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert (sample.e2e, sample.tokens, sample.accepted, sample.cached_tokens) == (0.6, 6, 3, 4)


def test_figures_of_two_requests() -> None:
    samples = [Sample.of(reply([(0.1, 1), (0.2, 4)], 0.2, cached=4)), Sample.of(reply([(0.2, 1), (0.4, 1)], 0.4))]
    figures = Figures.of(samples, 2.0, 0.7, SLO)
    assert figures.tokens_per_second == 7 / 2
    assert figures.requests_per_second == 1.0
    assert figures.goodput == 0.5  # the second request's first token came late
    assert figures.accepted_length == 7 / (7 - 3)
    assert (figures.prompt_tokens, figures.computed_prompt_tokens) == (20, 16)
    assert figures.cpu_per_token == pytest.approx(100)
    assert figures.ttft.mean == pytest.approx(150)
    assert figures.itl.p50 == pytest.approx(25)
    assert figures.itl.p99 > figures.itl.p90 > figures.itl.p50


@pytest.mark.parametrize("slo", [Slo(ttft=0.05, itl=1), Slo(ttft=1, itl=0.05)])
def test_both_bounds_count(slo: Slo) -> None:
    assert not Sample.of(reply([(0.1, 1), (0.2, 1)], 0.2)).meets(slo)


def test_a_failed_request_is_not_a_sample() -> None:
    with pytest.raises(ValueError, match="429"):
        Sample.of(Reply(429, error={"message": "full"}))


def test_gains_are_medians_of_pairs(tmp_path: Path) -> None:
    def cell(variant: Variant, amount: float, seconds: list[float]) -> Cell:
        runs = [Run(samples=[Sample.of(reply([(s, 1), (2 * s, 1)], s))], seconds=s, cpu_seconds=s) for s in seconds]
        return Cell.of(Key(variant, "prompts", amount), runs, SLO)

    off, auto = Variant("off", True), Variant("auto", True)
    # the last pair was slow: both took ten times as long
    cells = [cell(off, 1, [2.0, 2.2, 20.0]), cell(auto, 1, [1.0, 1.0, 10.0]), cell(auto, 2, [1.0, 1.0, 1.0])]
    made = provenance({"name": "tiny"}, "cpu")
    result = Result(provenance=made, settings={}, slo=SLO, cells=cells)
    assert result.gain(cells[1], "cpu_per_token") == result.gain(cells[1], "ttft.mean") == pytest.approx(2.0)
    assert result.gain(cells[0], "cpu_per_token") is None
    assert result.gain(cells[2], "cpu_per_token") is None
    assert cells[1].figures.seconds == 1.0
    assert markdown(result).count("| prompts, ") == 3
    assert write_plots(Result.model_validate_json(result.model_dump_json()), tmp_path) == [tmp_path / "concurrency.png"]


# -- loads -------------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_plain_decoding(server: Running, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_answers(bundle, [Server(server.url)], count=3, max_tokens=6)
    monkeypatch.setattr("benchmarks.load.answers.reference", lambda *_: [(single(1, {"max_tokens": 2})[0], "no")])
    with pytest.raises(D2SDError, match="not that of LLM"):
        check_answers(bundle, [Server(server.url)])


# -- the server --------------------------------------------------------------------------------------------------------


def test_usage_in_every_chunk(server: Running) -> None:
    """guidellm asks for the usage in every chunk."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "w5 w7", "max_tokens": 6, "stream": True, "stream_options": options}
    lines = server.http.post("/v1/completions", json=body).text.split("\n\n")
    counts = [json.loads(line[6:])["usage"]["completion_tokens"] for line in lines if line.startswith("data: {")]
    assert counts == sorted(counts)
    assert len(counts) > 2
    assert counts[-1] == counts[-2] == 6


def test_tokens_are_sent_at_once() -> None:
    """Connections have TCP_NODELAY: without it a token waits for the client's delayed ACK, 40 ms."""
    found = []

    async def accept() -> None:
        with listen("127.0.0.1", 0) as listener:

            async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                connection = writer.get_extra_info("socket")
                found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                writer.close()

            async with await asyncio.start_server(connected, sock=listener):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                await reader.read()
                writer.close()

    asyncio.run(accept())
    assert found == [1]


# -- other faces -------------------------------------------------------------------------------------------------------


def test_tokens_of_dynamo_are_counted_by_usage_and_its_errors_read() -> None:
    events = [
        {"choices": [{"delta": {"content": text}, "finish_reason": finish}], "usage": {"completion_tokens": count}}
        for text, count, finish in (("a", 1, None), ("bcd", 4, None), ("", 4, "length"))
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    answers = iter([(200, stream), (529, '{"message": "full", "type": "overloaded", "code": 529}')])
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        status, text = next(answers)
        return httpx.Response(status, text=text)

    async def asked() -> list[Reply]:
        client = DynamoClient("http://x", "tiny")
        client._transport = httpx.MockTransport(answer)
        return [await client.ask({"seed": 1}), await client.ask({})]

    found, refused = asyncio.run(asked())
    assert (found.text, found.tokens, [count for _, count in found.arrivals]) == ("abcd", 4, [1, 3])
    assert found.complete
    assert (refused.error or {})["code"] == 529
    assert bodies[0]["model"] == "tiny"
    assert "return_token_ids" not in bodies[0]


def test_processor_time_is_that_of_all_processes() -> None:
    command = ["sh", "-c", "(while :; do :; done) & wait"]  # the child alone computes
    with subprocess.Popen(command, start_new_session=True) as process:
        server = Server("http://127.0.0.1:1", None, process)
        while len(server.processes()) < 2:
            time.sleep(0.005)
        assert family(process.pid)[0] == process.pid
        assert len(server.thread_seconds()) == 2
        assert server.resident_bytes() > 0
        last = time.monotonic() + 20
        while (server.cpu_seconds() or 0) < 0.1 and time.monotonic() < last:
            time.sleep(0.01)
        spent = server.cpu_seconds()
        os.killpg(process.pid, signal.SIGKILL)
    assert spent is not None
    assert spent >= 0.1
    assert server.cpu_seconds() == 0
    assert not server.accepts()
