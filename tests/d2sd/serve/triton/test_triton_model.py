"""The model of Triton's Python backend, through a stand-in for the backend's module."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2sd import LLM, SamplingParams
from d2sd.errors import D2SDError, RequestError
from d2sd.serve.triton.parameters import Parameters
from d2sd.serve.triton.sender import Sender, describe
from tests.d2sd.serve.http import wait_until
from tests.d2sd.serve.triton import fake
from tests.d2sd.serve.triton.fake import Refused, Request, ResponseSender, pb_utils
from tests.processes import alive

Start = Callable[..., Any]


@pytest.fixture
def start(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Initialize a model on the tiny bundle; its context is 64 tokens."""
    name = "d2sd.serve.triton.model"
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake.pb_utils())
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(fake.MetricFamily, "metrics", {})
    module = import_module(name)
    monkeypatch.setattr(module, "end_with_parent", lambda: None)
    models = []

    def start(*, max_batch_size: int = 0, **parameters: Any) -> Any:
        model = module.TritonPythonModel()
        given = Parameters(**{"bundle": str(tiny_bundle), "drain_timeout": 5, **parameters})
        model.initialize(fake.arguments(given, max_batch_size=max_batch_size))
        models.append(model)
        return model

    yield start
    for model in models:
        if not model._closed:
            model.finalize()
    sys.modules.pop(name, None)


@contextmanager
def paused(model: Any) -> Iterator[threading.Semaphore]:
    """Let the engine take a step for each permit, and all steps afterwards."""
    engine, permits = model._engine.engine, threading.Semaphore(0)
    step = engine.step

    def wait() -> Any:
        permits.acquire(timeout=20)
        return step()

    engine.step = wait
    try:
        yield permits
    finally:
        engine.step = step
        permits.release(1000)


def test_both_families_and_shapes_give_the_text_of_llm(start: Start, llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=12, stop="w54")
    (expected,) = llm.generate("w3 w4", params)
    given = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "max_tokens": 12, "stop": ["w54"], "n": 1, "logprobs": False}
    named: dict[str, Any] = {
        f"sampling_param_{key}": given[key] for key in ("temperature", "top_p", "seed", "max_tokens", "stop")
    }
    requests = [
        Request(text_input="w3 w4", streaming=True, **named),
        Request(text_input="w3 w4", temperature=0.7, top_p=0.9, seed=3, max_tokens=12, stop_words=["w54"], stream=True),
        Request(shape=(1, 1), text_input="w3 w4", sampling_parameters=json.dumps(given)),
    ]
    model = start()
    model.execute(requests)
    assert [request.all()["text_output"] for request in requests] == [expected.text] * 3


def test_the_last_response_reports_what_was_asked(start: Start, llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, logprobs=0)
    (expected,) = llm.generate("w3 w4", params)
    model = start()
    names = ("finish_reason", "stop_reason", "cumulative_logprob", "num_input_tokens", "num_output_tokens")
    flags: dict[str, Any] = {f"return_{name}": True for name in names} | {"sampling_param_return_perf_metrics": True}
    asked = Request(text_input="w3 w4", max_tokens=12, exclude_input_in_output=False, **flags)
    model.execute([asked])
    outputs = asked.all()
    assert outputs["text_output"] == "w3 w4" + expected.text
    assert outputs["finish_reason"] == b"length"
    assert outputs["stop_reason"] == b""
    assert (outputs["num_input_tokens"], outputs["num_output_tokens"]) == (2, 12)
    assert expected.logprobs is not None
    total = sum(p[t].logprob for t, p in zip(expected.token_ids, expected.logprobs, strict=True))
    assert outputs["cumulative_logprob"] == pytest.approx(total, abs=1e-4)
    assert outputs["total_draft_tokens"] == expected.stats.verified_nodes - expected.stats.steps
    accepted = 12 - expected.stats.steps + (expected.stats.tokens > 12)
    assert outputs["total_accepted_draft_tokens"] == accepted
    assert outputs["acceptance_rate"] == pytest.approx(accepted / outputs["total_draft_tokens"])
    assert outputs["arrival_time_ns"] < outputs["first_token_time_ns"] <= outputs["last_token_time_ns"]
    assert outputs["kv_cache_missed_block"] == 1

    plain = Request(text_input="w3 w4", max_tokens=12)
    model.execute([plain])
    assert plain.next()[0].keys() == {"text_output"}


def test_a_stream_may_be_sent_in_fewer_responses(start: Start, llm: LLM) -> None:
    (expected,) = llm.generate("w3 w4", SamplingParams(max_tokens=40))
    model = start(policy="off", stream_interval=6)
    request = Request(text_input="w3 w4", max_tokens=40, stream=True, return_num_output_tokens=True)
    model.execute([request])
    text, counts, final = b"", [], False
    while not final:
        outputs, final = request.next()
        text += outputs["text_output"]
        counts.append(outputs["num_output_tokens"])
    assert text.decode() == expected.text
    assert sum(counts) == len(expected.token_ids)
    assert len(counts) > 2
    assert min(counts[1:-1]) >= 6


def test_a_stop_string_and_a_stop_token_are_reasons(start: Start) -> None:
    model = start()
    free = Request(text_input="w3 w4", max_tokens=12)
    model.execute([free])
    first, *_, last = free.all()["text_output"].split()
    by_string = Request(text_input="w3 w4", max_tokens=12, stop_words=["w1000", last], return_stop_reason=True)
    late = json.dumps({"stop": [first, last], "min_tokens": 3, "max_tokens": 12})
    behind = Request(text_input="w3 w4", sampling_parameters=late, return_stop_reason=True)
    stop = json.dumps({"stop_token_ids": [int(last[1:])], "max_tokens": 12})
    by_token = Request(text_input="w3 w4", sampling_parameters=stop, return_stop_reason=True)
    model.execute([by_string, behind, by_token])
    assert first != last
    assert by_string.all()["stop_reason"].decode() == behind.all()["stop_reason"].decode() == last
    assert by_token.all()["stop_reason"].decode() == last[1:]


def test_a_client_that_cancels_frees_its_pages_before_the_next_step(start: Start) -> None:
    model = start()
    scheduler = model._engine.engine.scheduler
    for how in ("gRPC", "stop"):
        with paused(model) as permits:
            request = Request("a", text_input="w3 w4", max_tokens=40, stream=True)
            model.execute([request])
            permits.release(2)
            request.next()
            assert scheduler.running
            if how == "gRPC":
                request.sender.cancelled = True
            else:
                other = Request("a", stop=True)
                model.execute([other])
                assert other.next() == ({}, True)
            wait_until(partial(getattr, request.sender, "ended"))
            permits.release()  # the step that had begun
            wait_until(lambda: not scheduler.running)
        with pytest.raises(Refused, match="cancelled"):
            request.all()
    wait_until(lambda: not model._senders)


def test_a_request_is_cancelled_before_it_reaches_the_engine(start: Start) -> None:
    model = start(max_batch=1)
    with paused(model) as permits:
        running, waiting = (Request(text_input="w3 w4", max_tokens=4) for _ in range(2))
        model.execute([running, waiting])
        waiting.sender.cancelled = True
        with pytest.raises(Refused, match="cancelled"):
            waiting.all()
        permits.release(20)
        assert running.all()["text_output"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"max_tokens": 2}, "prompt is missing"),
        ({"text_input": "w3", "max_tokens": 900}, "maximum context length"),
        ({"text_input": "w3", "top_p": 2.0}, "top_p"),
        ({"text_input": "w3", "temperature": float("nan")}, "temperature"),
        ({"stop": True}, "its id"),
    ],
)
def test_a_refusal_is_the_clients_error(start: Start, inputs: dict[str, Any], message: str) -> None:
    model = start()
    request = Request(**inputs)
    model.execute([request])
    with pytest.raises(Refused, match=message) as refused:
        request.all()
    assert refused.value.args[0] == "invalid"
    good = Request(text_input="w3", max_tokens=2)
    model.execute([good])
    assert good.all()["text_output"]


def test_an_empty_prompt_begins_at_the_first_token(start: Start, llm: LLM) -> None:
    """Triton's zero_data in a warm-up is an empty string."""
    model = start()
    request = Request(text_input="", max_tokens=4)
    model.execute([request])
    assert request.all()["text_output"] == llm.generate("w2", SamplingParams(max_tokens=4))[0].text


def test_the_queue_is_bounded(start: Start) -> None:
    model = start(max_batch=1, max_waiting=1)
    with paused(model):
        requests = [Request(text_input="w3", max_tokens=4) for _ in range(3)]
        for request in requests:
            model.execute([request])
        with pytest.raises(Refused, match="Too many requests") as refused:
            requests[2].all()
        assert refused.value.args[0] == "unavailable"
    assert requests[0].all()["text_output"] == requests[1].all()["text_output"]


def test_finalize_drains(start: Start, llm: LLM) -> None:
    model = start()
    running = Request(text_input="w3 w4", max_tokens=40)
    model.execute([running])
    wait_until(lambda: model._engine.live)
    model.finalize()
    assert running.all()["text_output"] == llm.generate("w3 w4", SamplingParams(max_tokens=40))[0].text
    assert model._engine.health is not None

    model = start(drain_timeout=0.01)
    with paused(model) as permits:
        cut = Request(text_input="w3 w4", max_tokens=40)
        model.execute([cut])
        wait_until(lambda: model._engine.live)
        done = threading.Thread(target=model.finalize)
        done.start()
        time.sleep(0.05)
        permits.release()
        with pytest.raises(Refused, match="shutting down"):
            cut.all()
        done.join(10)


def test_a_failed_engine_refuses_by_name(start: Start) -> None:
    model = start()

    def fail() -> Any:
        raise OSError("no memory")

    model._engine.engine.step = fail
    for _ in range(2):
        request = Request(text_input="w3", max_tokens=4)
        model.execute([request])
        with pytest.raises(Refused, match="engine failed"):
            request.all()


def test_metrics_are_published_in_triton(start: Start) -> None:
    model = start()
    request = Request(text_input="w3 w4", max_tokens=12)
    model.execute([request])
    request.all()
    metrics = fake.MetricFamily.metrics
    expected = {
        "d2sd_generation_tokens_total tiny tiny_0_0": 12,
        "d2sd_request_success_total tiny length tiny_0_0": 1,
        "d2sd_kv_pages_used tiny tiny_0_0": 0,
        "d2sd_time_to_first_token_seconds_count tiny tiny_0_0": 1,
        "d2sd_time_to_first_token_seconds_bucket tiny +Inf tiny_0_0": 1,
        "d2sd_inter_token_latency_seconds_count tiny tiny_0_0": 11,
    }
    # another thread is publishing them one by one
    wait_until(lambda: {name: metrics[name].value for name in expected.keys() & metrics.keys()} == expected)
    assert metrics["d2sd_kv_pages tiny tiny_0_0"].value > 0
    model._publisher.cancel()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), model._loop).result(20)  # what it had begun is over
    (policy,) = (metric for name, metric in metrics.items() if name.startswith("d2sd_policy_in_force"))
    assert policy.value == 1
    model._metrics.refresh = model._metrics._in_force.clear  # another policy is in force
    messages = sum(metric.messages for metric in metrics.values())
    model._metrics.publish()
    assert policy.value == 0
    assert sum(metric.messages for metric in metrics.values()) == messages + 1  # only what has changed
    assert metrics["d2sd_generation_tokens_total tiny tiny_0_0"].value == 12


def test_parameters_of_the_model(start: Start, tiny_bundle: Path) -> None:
    model = start(max_batch_size=1)
    request = Request(shape=(1, 1), text_input="w3", max_tokens=2)
    model.execute([request])
    response, _ = request.sender.sent.get(timeout=20)
    assert response is not None
    assert response.output_tensors[0].as_numpy().shape == (1, 1)
    assert start()._engine.engine.limits.prefix_cache
    given = Parameters.parse([f"bundle={tiny_bundle}", "prefix_cache=false"])
    assert not start(**given.model_dump())._engine.engine.limits.prefix_cache


def test_a_wrong_parameter_fails_the_load_with_its_name(start: Start, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="manifest") as failed:
        start(bundle=str(tmp_path))
    assert type(failed.value).__name__ == "TritonModelException"


def test_the_process_ends_with_its_parent() -> None:
    """Even while a call holds Python's global lock, as calls into a dead server do."""
    stuck = "import ctypes, os; from d2sd.serve.triton.process import end_with_parent; watcher = end_with_parent(); "
    stuck += "print(os.getpid(), watcher.pid, flush=True); ctypes.PyDLL(None).sleep(60)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stuck!r}])"
    server = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pids = [int(pid) for pid in server.stdout.readline().split()]
    time.sleep(0.6)
    assert all(map(alive, pids))
    server.kill()
    server.wait()
    wait_until(lambda: not any(map(alive, pids)))
    server.stdout.close()


def test_nothing_is_asked_of_triton_after_the_last_response() -> None:
    triton = ResponseSender(cancelled=True)
    sender = Sender(triton, pb_utils(), batched=False)
    seen = [sender.cancelled]
    sender.send({"text_output": np.array([b"a"], np.object_)})
    sender.cancel()
    assert triton.ended
    assert [*seen, sender.cancelled] == [True, False]
    sender.end()
    sender.fail(RequestError("late"))
    sender.send({"text_output": np.array([b"b"], np.object_)}, final=True)
    assert triton.sent.qsize() == 2


def test_an_error_of_ours_keeps_its_text() -> None:
    missing = D2SDError("Structured output needs llguidance.", fix="pip install 'd2sd[structured]'")
    assert describe(missing) == (str(missing), "UNSUPPORTED")
    assert describe(KeyError("x")) == ("The model failed to process the request.", "INTERNAL")
