"""A real Triton server of the wheel nvidia-pytriton: `make triton-test`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from d2sd import LLM, SamplingParams
from d2sd.serve.triton.repository import write_repository
from tests.d2sd.serve.conftest import build_tiny
from tests.d2sd.serve.http import wait_until
from tests.d2sd.serve.triton.server import Triton, serving
from tests.processes import alive

pytest.importorskip("tritonclient.grpc", reason="needs tritonclient: make triton-test")
pytest.importorskip("pytriton", reason="needs nvidia-pytriton: make triton-test")

from benchmarks.load import victim_grpc
from tests.d2sd.serve.triton.grpc_client import Streams

pytestmark = [pytest.mark.slow, pytest.mark.subprocess, pytest.mark.timeout(600)]

#: A request that is in the middle for a while; the tiny model's context is 512.
LONG: dict[str, Any] = {
    "text_input": "w3 w4",
    "sampling_parameters": json.dumps({"max_tokens": 480, "ignore_eos": True}),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = {"max_context": 512, "max_batch": 8, "page_size": 16, "prefill_chunk": 64}
    return build_tiny(tmp_path_factory.mktemp("bundle"), limits=limits)


@pytest.fixture(scope="module")
def repository(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_repository(folder, bundle)
    write_repository(folder, bundle, "batched", ["max_batch=2", "max_waiting=1"], batched=True)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with serving(repository, tmp_path_factory.mktemp("log") / "triton.log") as running:
        yield running


@pytest.fixture
def streams(server: Triton) -> Iterator[Streams]:
    made = Streams(server.grpc)
    yield made
    made.close(cancel=True)


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    return LLM(bundle)


def idle(server: Triton) -> bool:
    return server.metric("kv_pages_used") == 0 and server.metric("num_requests_running") == 0


def test_the_warm_up_ran(server: Triton) -> None:
    """The first test of this server: nobody has asked for a token. The metrics are published twice a second."""
    wait_until(lambda: server.metric("generation_tokens_total") >= 1)
    assert "warmup" not in server.log.read_text(errors="replace").lower()


def test_health_and_generate(server: Triton, llm: LLM) -> None:
    assert server.status("/v2/health/live") == server.status("/v2/health/ready") == 200
    (expected,) = llm.generate("w3 w4", SamplingParams(max_tokens=12))
    answer = server.generate(
        text_input="w3 w4",
        sampling_param_max_tokens=12,
        sampling_param_return_perf_metrics=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
    )
    assert answer["text_output"] == expected.text
    assert answer["finish_reason"] == expected.finish_reason
    assert answer["num_output_tokens"] == len(expected.token_ids)
    assert answer["total_draft_tokens"] == expected.stats.verified_nodes - expected.stats.steps


def test_generate_stream(server: Triton, llm: LLM) -> None:
    body = {"text_input": "w3 w4", "max_tokens": 12, "stream": True, "temperature": 0.7, "seed": 5}
    status, text = server.call("/v2/models/tiny/generate_stream", body)
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert status == 200
    assert len(events) > 1
    expected = llm.generate("w3 w4", SamplingParams(temperature=0.7, seed=5, max_tokens=12))[0].text
    assert "".join(event["text_output"] for event in events) == expected


def test_32_streams_equal_llm(streams: Streams, llm: LLM) -> None:
    """Under load, greedy and sampled, with the names of both families."""
    params = [SamplingParams(temperature=0.7 * (i % 2), top_p=0.9, seed=i, max_tokens=20 + i) for i in range(32)]
    for i, p in enumerate(params):
        prompt = f"w{i + 3} w4"
        given: dict[str, Any] = {
            "temperature": p.temperature,
            "top_p": p.top_p,
            "seed": p.seed,
            "max_tokens": p.max_tokens,
        }
        if i % 3 == 0:
            named = {f"sampling_param_{name}": value for name, value in given.items()}
            streams.open(str(i), text_input=prompt, streaming=True, **named)
        elif i % 3 == 1:
            streams.open(str(i), text_input=prompt, stream=True, **given)
        else:
            streams.open(str(i), text_input=prompt, stream=True, sampling_parameters=json.dumps(given))
    found = [streams.text(str(i)) for i in range(32)]
    assert found == [answer.text for answer in llm.generate([f"w{i + 3} w4" for i in range(32)], params)]


def test_cancelled_streams_free_their_pages(server: Triton) -> None:
    streams = Streams(server.grpc)
    for i in range(4):
        streams.open(str(i), stream=True, **LONG)
    for i in range(4):
        streams.next(str(i))
    wait_until(lambda: server.metric("num_requests_running") == 4)
    streams.close(cancel=True)
    seconds = wait_until(lambda: idle(server))
    assert seconds < 2, seconds  # the metrics are published twice a second
    assert server.generate(text_input="w3", max_tokens=2)["status"] == 200


def test_a_request_is_stopped_by_its_id(server: Triton, streams: Streams) -> None:
    streams.open("a", stream=True, **LONG)
    streams.next("a")
    other = Streams(server.grpc)
    other.open("a", text_input="", stop=True)
    assert other.next("a") == ({}, True)
    other.close()
    with pytest.raises(Exception, match="cancelled"):
        streams.text("a")
    wait_until(lambda: idle(server))


def test_a_killed_client_frees_its_pages(server: Triton) -> None:
    command = [sys.executable, victim_grpc.__file__, f"127.0.0.1:{server.grpc}", "tiny", "1", "480"]
    client = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline()
    client.kill()
    client.wait()
    client.stdout.close()
    wait_until(lambda: idle(server), 5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"max_tokens": 2}, "text_input"),
        ({"text_input": "w3", "max_tokens": 10_000}, "maximum context length"),
        ({"text_input": "w3", "sampling_parameters": '{"nonsense": 1}'}, "nonsense"),
        ({"text_input": "w3", "lora_name": "x"}, "lora_name"),
        ({"text_input": "w3", "no_such_input": 1}, "no_such_input"),
        ({"text_input": ["w3", "w4"]}, "one value"),
        ({"text_input": "w3", "max_tokens": "many"}, "Unable to parse"),
    ],
)
def test_bad_inputs_are_clear_errors(server: Triton, inputs: dict[str, Any], message: str) -> None:
    answer = server.generate(**inputs)
    assert answer["status"] >= 400
    assert message in answer["error"]
    assert server.generate(text_input="w3", max_tokens=2)["status"] == 200


def test_unload_lets_streams_finish_and_load_serves_again(server: Triton, streams: Streams, llm: LLM) -> None:
    streams.open("a", stream=True, **LONG)
    before, _ = streams.next("a")
    assert server.load(unload=True) == 200
    wait_until(lambda: not server.ready())
    assert server.generate(text_input="w3", max_tokens=2)["status"] >= 400
    expected = llm.generate("w3 w4", SamplingParams(max_tokens=480, ignore_eos=True))[0].text
    assert before["text_output"][0].decode() + streams.text("a") == expected
    streams.close()  # Triton keeps a model that a stream has used until the stream is closed
    wait_until(lambda: not any(map(alive, server.stubs)))
    assert server.load() == 200
    wait_until(server.ready, 60)
    assert server.generate(text_input="w3", max_tokens=2)["status"] == 200
    server.stubs = server.processes()


def test_the_queue_is_bounded_and_inputs_may_have_a_leading_dimension(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", model="batched") as server:
        streams = Streams(server.grpc, "batched")
        for i in range(3):
            streams.open(str(i), (1, 1), stream=True, **LONG)
        wait_until(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 3)
        refused = server.generate(text_input="w3", max_tokens=2)
        assert refused["status"] == 400  # `generate` of Triton 24.10 has one status for all errors
        assert "Too many requests" in refused["error"]
        streams.close(cancel=True)
        wait_until(lambda: idle(server))
        assert server.generate(text_input="w3", max_tokens=2)["status"] == 200


def test_sigterm_drains(repository: Path, tmp_path: Path, llm: LLM) -> None:
    with serving(repository, tmp_path / "log") as server:
        streams = Streams(server.grpc)
        streams.open("a", stream=True, **LONG)
        before, _ = streams.next("a")
        server.process.send_signal(signal.SIGTERM)
        expected = llm.generate("w3 w4", SamplingParams(max_tokens=480, ignore_eos=True))[0].text
        assert before["text_output"][0].decode() + streams.text("a") == expected
        streams.close()
        server.process.wait(60)
        wait_until(lambda: not any(map(alive, server.stubs)), 10)


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("kind", ["idle", "streaming", "killed", "interrupted"])
def test_no_process_is_left(repository: Path, tmp_path: Path, kind: str, turn: int) -> None:
    """Triton 24.10 may hang after its exit timeout while a client's stream is open: then it is killed, as by Docker."""
    server = Triton(repository, tmp_path / "log", "--exit-timeout-secs=3")
    streams = Streams(server.grpc)
    try:
        streams.open("a", stream=True, **LONG)
        streams.next("a")
        if kind == "idle":
            streams.text("a")
            streams.close()
            server.stop(signal.SIGTERM, 30)
            return
        how = {"killed": signal.SIGKILL, "interrupted": signal.SIGINT}.get(kind, signal.SIGTERM)
        try:
            server.stop(how, 8)
        except subprocess.TimeoutExpired:
            server.stop(signal.SIGKILL)
    finally:
        if kind != "idle":
            streams.close(cancel=True)
        server.kill()
