"""One LLM and many threads: answers are those of serial calls, requests share the batch, no caller harms another."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest
import torch

from d2sd import LLM, EngineFailed, RequestError, SamplingParams
from d2sd.runtime.engine import Engine
from d2sd.runtime.sequence import Output
from tests.d2sd.serve.engines import Held, idle
from tests.d2sd.serve.http import wait_until

LONG = SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.fixture
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, policy="hybrid", max_batch=8) as llm:
        yield llm


def hold(llm: LLM) -> Held:
    return Held(llm._session.open()[1])


def in_thread(call: Callable[[], Any]) -> tuple[Thread, list[Any]]:
    """Run a call in a thread; the list gets its result or its exception."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = Thread(target=run)
    thread.start()
    return thread, found


def request(number: int) -> tuple[str, SamplingParams]:
    prompt = " ".join(f"w{3 + (number * step) % 29}" for step in range(1, 2 + number % 5))
    return prompt, SamplingParams(temperature=number % 2, seed=number, max_tokens=3 + number % 4)


@pytest.mark.parametrize(("policy", "count"), [("off", 24), pytest.param("hybrid", 200, marks=pytest.mark.slow)])
def test_eight_threads_get_the_answers_of_serial_calls(tiny_bundle: Path, policy: Any, count: int) -> None:
    requests = [request(number) for number in range(count)]
    with LLM(tiny_bundle, policy=policy, max_batch=8) as llm:
        expected = [llm.generate(*one)[0].token_ids for one in requests]
        serial, held = llm.stats.steps, hold(llm)
        held.open.set()

        def call(one: tuple[str, SamplingParams]) -> list[int]:
            if one[1].seed is not None and one[1].seed % 10 == 0:
                assert "".join(llm.stream(*one)) == llm.generate(*one)[0].text
            return llm.generate(*one)[0].token_ids

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(call, requests)) == expected
        assert llm.stats.steps == serial * 2 + sum(llm.generate(*one)[0].stats.steps for one in requests[::10]) * 2
        assert held.steps < serial * 0.6  # they share the batch
        assert idle(held.engine)


@pytest.fixture(params=[1, 2])
def torch_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.slow
def test_two_objects_in_two_threads(tiny_bundle: Path, torch_threads: int) -> None:
    """Whether OpenMP runs each of their passes in one thread or in a team."""
    requests = [request(number) for number in range(8)]
    llms = [LLM(tiny_bundle, policy=policy) for policy in ("hybrid", "chain")]
    expected = [llms[0].generate(*one)[0].token_ids for one in requests]

    def answers(llm: LLM) -> list[list[int]]:
        return [llm.generate(*one)[0].token_ids for one in requests]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(answers, llms)) == [expected] * 2


@pytest.mark.slow
def test_a_long_answer_does_not_starve_a_later_call(llm: LLM) -> None:
    thread, found = in_thread(lambda: llm.generate(["w5 w7"] * 12, LONG))  # more than the batch
    wait_until(lambda: llm._session.open()[1].busy)
    assert len(llm.generate("w9", SamplingParams(max_tokens=2))[0].token_ids) == 2
    thread.join()
    assert [len(answer.token_ids) for answer in found[0]] == [50] * 12


def test_ctrl_c_ends_one_call_and_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt comes while the main thread waits, in the middle of a step."""
    expected = llm.generate("w5 w7", LONG)[0].token_ids
    held = hold(llm)
    thread, found = in_thread(lambda: llm.generate("w5 w7", LONG)[0].token_ids)
    assert held.reached.wait(20)
    waits = Future.result

    def interrupted(future: Future[None], timeout: float | None = None) -> None:
        if current_thread() is main_thread():
            raise KeyboardInterrupt
        return waits(future, timeout)  # the other thread may come here at the same time

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("w9 w9", LONG)
    held.open.set()
    thread.join()
    assert found == [expected]
    wait_until(lambda: not held.engine.busy)
    assert llm.stats.tokens < 3 * 50  # the interrupted request left the batch


def test_closing_ends_the_calls_of_other_threads(tiny_bundle: Path) -> None:
    llm = LLM(tiny_bundle)
    held = hold(llm)
    stream = llm.stream("w5", LONG)
    calls = [in_thread(call) for call in (lambda: llm.generate("w5", LONG), lambda: list(stream))]
    assert held.reached.wait(20)
    closing, closed = in_thread(llm.close)
    held.open.set()
    for thread, found in (*calls, (closing, closed)):
        thread.join(20)
        assert not thread.is_alive()
        assert found[0] is None or str(found[0]).startswith("The LLM is closed.\n  fix: open the bundle again")
    assert closed == [None]
    llm.close()  # again
    assert repr(llm).endswith("backend='torch', closed)")


def test_a_failed_engine_ends_every_call_and_says_why(llm: LLM) -> None:
    held = hold(llm)

    def fail() -> list[Output]:
        raise ValueError("out of registers")

    held.step = fail
    calls = [in_thread(lambda: llm.generate("w5", LONG)) for _ in range(2)]
    held.open.set()
    for thread, found in calls:
        thread.join(20)
        assert isinstance(found[0], EngineFailed)
    with pytest.raises(EngineFailed, match="ValueError: out of registers\n  fix: open the bundle again"):
        llm.generate("w5")


def test_a_refused_prompt_ends_its_own_call_alone(llm: LLM) -> None:
    held = hold(llm)
    thread, found = in_thread(lambda: llm.generate("w5 w7", LONG)[0].token_ids)
    assert held.reached.wait(20)
    with pytest.raises(RequestError, match="maximum context length"):
        llm.generate(["w5", "w5 " * 200])
    held.open.set()
    thread.join()
    assert len(found[0]) == 50


@pytest.mark.parametrize("end", ["close", "forget"])
def test_the_engine_and_its_thread_end_with_the_object(tiny_bundle: Path, end: str) -> None:
    llm = LLM(tiny_bundle)
    llm.generate("w5", SamplingParams(max_tokens=2))
    engine: weakref.ref[Engine] = weakref.ref(llm._session.open()[1])
    service = llm._session._served()
    if end == "close":
        llm.close()
    del llm
    gc.collect()
    assert service._thread is not None
    assert not service._thread.is_alive()
    del service
    gc.collect()
    assert engine() is None


def in_child(call: Callable[[], str]) -> str:
    """Returns what a call gives in a fork of this process; empty where the call does not return within seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # its default action ends the child
        try:
            os.write(writing, call().encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_forked_child_generates_too(llm: LLM) -> None:
    expected = llm.generate("w5 w7")[0].text
    assert in_child(lambda: llm.generate("w5 w7")[0].text) == expected


def test_a_fork_of_a_parent_at_work_is_refused_and_the_parent_goes_on(llm: LLM) -> None:
    refused = "RequestError: An LLM that is at work, or has several processes, cannot be forked."
    expected = llm.generate("w5 w7", LONG)[0].text
    held, stream = hold(llm), llm.stream("w5 w7", LONG)
    held.open.set()
    begun = next(stream)
    held.open.clear()
    held.reached.clear()
    assert held.reached.wait(20)

    def closed_first() -> str:
        llm.close()
        return llm.generate("w5")[0].text

    for call in (lambda: llm.generate("w5 w7")[0].text, lambda: next(stream), closed_first):
        assert in_child(call).startswith(refused)
    held.open.set()
    assert begun + "".join(stream) == expected
    with llm._session._tokenizing:
        assert in_child(lambda: llm.generate("w5 w7")[0].text).startswith(refused)
    assert in_child(lambda: llm.generate("w5 w7", LONG)[0].text) == expected


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_program_may_end_in_the_middle(tiny_bundle: Path) -> None:
    """With an open stream and with a call in a daemon thread: no crash, no message."""
    code = f"""
import contextlib, threading, time
from d2sd import LLM, RequestError, SamplingParams

def call():
    with contextlib.suppress(RequestError):
        llm.generate(["w5"] * 20, params)

llm = LLM({str(tiny_bundle)!r})
params = SamplingParams(max_tokens=50, ignore_eos=True)
stream = llm.stream("w5", params)
print(next(stream))
threading.Thread(target=call, daemon=True).start()
while llm._session._served().live < 20:
    time.sleep(0.001)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("w")
    assert done.stderr == ""
