"""The attack on a server: classes that repeat themselves, and judges that can fail."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.attack import verdicts
from benchmarks.attack.neighbours import Visit
from benchmarks.attack.plan import EXPENSIVE, MALFORMED
from benchmarks.attack.send import NO_ANSWER, NOT_SENT, Sent
from benchmarks.attack.verdicts import Delays
from benchmarks.attack.watch import Watch
from benchmarks.load.server import Server
from tools.hostile.case import Case, Kind, Scene

KINDS = [*EXPENSIVE, *MALFORMED]
PAGES = {
    "d2sd_kv_pages_used": 0.0,
    "d2sd_num_requests_running": 0.0,
    "d2sd_num_requests_waiting": 0.0,
    "d2sd_kv_pages": 9.0,
}


def sent(outcome: str, answer: bytes = b"", fault: str = "", **body: Any) -> Sent:
    return Sent("fields", 3, Case.of({"prompt": "a", "seed": 1} | body), outcome, 0.1, answer, fault)


def visit(delay: float, at: float = 0.0, text: str = "yes") -> Visit:
    return Visit(0, at, at + delay, at + delay + 0.1, text, complete=True)


# -- classes -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_classes_repeat_themselves_and_bring_new_values(kind: Kind) -> None:
    small = Scene(vocab=100, context=64)
    first = [kind.case(1, number, small) for number in range(6)]
    assert [kind.case(1, number, small) for number in range(6)] == first
    assert [kind.case(2, number, small) for number in range(6)] != first


# -- judges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one", [sent("500"), sent("502"), sent("504"), sent("no answer", fault="no answer within 5 s")]
)
def test_statuses_that_no_client_may_cause(one: Sent) -> None:
    assert [fault.partition(":")[0] for fault in verdicts.of_statuses([one])] == ["fields, number 3"]


@pytest.mark.parametrize(
    "one", [sent("200"), sent("400"), sent("501"), sent("503"), sent("504", deadline=1.0), sent(NOT_SENT)]
)
def test_statuses_that_are_fine(one: Sent) -> None:
    assert verdicts.of_statuses([one]) == []


def test_one_slow_neighbour_in_a_hundred_is_allowed_two_are_not() -> None:
    quick = [visit(0.1)] * 99
    assert verdicts.of_delays("x", Delays.of([*quick, visit(9.0)]), 0.3) == []
    assert "wait 9.00 s" in verdicts.of_delays("x", Delays.of([*quick, visit(9.0), visit(9.0)]), 0.3)[0]
    assert verdicts.of_delays("x", Delays.of([visit(0.4)]), 0.3)
    assert verdicts.of_delays("x", Delays.of([]), 0.3) == ["x: no honest client was served"]


def test_a_class_is_blamed_for_many_delays_or_a_stall() -> None:
    quick = [visit(0.1)] * 19
    assert verdicts.of_class("x", Delays.of([*quick, visit(0.8)]), 0.3) == []
    assert "wait 0.95 s" in verdicts.of_class("x", Delays.of([*quick, visit(0.95)]), 0.3)[0]
    assert "wait 0.40 s" in verdicts.of_class("x", Delays.of([*quick, *[visit(0.4)] * 3]), 0.3)[0]
    assert verdicts.of_class("x", Delays.of([]), 0.3)


def test_a_neighbour_without_an_answer_has_waited_until_the_end() -> None:
    assert Visit(0, sent=1.0, first=None, end=8.0).delay == 7.0
    visits = [visit(0.5, at=1.0), visit(6.0, at=2.0), visit(0.5, at=9.0)]
    assert verdicts.during(visits, 3.0, 8.0) == [visits[1]]


def test_wrong_and_broken_honest_answers() -> None:
    broken = Visit(0, 0.0, error="status 500")
    assert verdicts.of_visits([visit(0.1), Visit(0, 0.0)], ["yes"]) == []  # the second one was open at the end
    assert len(verdicts.of_visits([visit(0.1, text="no"), broken], ["yes"])) == 2


def test_memory_pages_series_and_exit() -> None:
    assert verdicts.of_memory(100, 119, 110, 1.2) == []
    assert len(verdicts.of_memory(100, 121, 121, 1.2)) == 2
    assert verdicts.of_pages(PAGES, PAGES) == []
    assert verdicts.of_pages(PAGES, PAGES | {"d2sd_kv_pages_used": 1.0}) == ["idle, but d2sd_kv_pages_used is 1"]
    assert verdicts.of_pages(PAGES, PAGES | {"d2sd_kv_pages": 8.0}) == ["d2sd_kv_pages is 8, 9 at the start"]
    assert verdicts.of_series(100, 110, 40) == []
    assert verdicts.of_series(100, 141, 40)
    assert [verdicts.of_exit(code) == [] for code in (0, -15, 143, -9, 1, None)] == [True] * 3 + [False] * 3


def test_answers_differ_by_what_the_model_says_only() -> None:
    def answer(name: str, text: str, logprob: float) -> bytes:
        choice = {"text": text, "logprobs": {"token_logprobs": [logprob]}}
        return json.dumps({"id": name, "choices": [choice], "created": time.time()}).encode()

    assert verdicts.of_answer("x", answer("a", "yes", -1.0), answer("b", "yes", -1.00001)) == []
    assert "choices[0].text" in verdicts.of_answer("x", answer("a", "yes", -1.0), answer("b", "no", -1.0))[0]
    assert verdicts.of_answer("x", answer("a", "yes", -1.0), answer("b", "yes", -1.1))
    assert verdicts.of_answer("x", b"{}", None)


def test_streams_are_compared_by_their_text() -> None:
    def stream(*parts: str) -> bytes:
        events = [{"id": parts[0], "choices": [{"index": 0, "text": part, "finish_reason": None}]} for part in parts]
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"

    assert verdicts.of_answer("x", stream("a", "bc"), stream("ab", "c")) == []
    assert verdicts.of_answer("x", stream("a", "bc"), stream("ab"))


def test_what_takes_long_by_right_is_no_fault() -> None:
    left = Sent("many answers", 1, Case(), NO_ANSWER, 30.0, fault="no answer within 30 s", by_right=True)
    assert verdicts.of_statuses([left]) == []
    assert verdicts.of_statuses([replace(left, by_right=False)])
    assert verdicts.of_statuses([replace(left, outcome="500")])


def test_errors_of_the_log_are_counted() -> None:
    error = {"level": "error", "message": "a request failed", "error": "Traceback\n  x\nTypeError: no"}
    lines = [json.dumps(error | {"time": n}) for n in range(3)]
    lines.append(json.dumps({"event": "request", "id": "7", "status": 500, "path": "/x"}))
    assert verdicts.of_log(lines) == [
        "in the log, 3 times: a request failed: TypeError: no",
        "in the log, 1 times: status 500 of /x",
    ]
    assert verdicts.of_log(["Traceback"]) == ["in the log, 1 times: Traceback"]


def test_a_server_with_too_much_memory_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "x = b'1' * (80 << 20); import time; time.sleep(60)"]) as process:
        with Watch(Server("http://127.0.0.1:1", None, process), 60 << 20) as watch:
            assert process.wait(30) == -9
        assert watch.killed
        assert watch.peak() > 60 << 20
