"""The attack on a server: classes that repeat themselves, and judges that can fail."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.attack import verdicts
from benchmarks.attack.neighbours import Visit
from benchmarks.attack.plan import EXPENSIVE, MALFORMED
from benchmarks.attack.send import NO_ANSWER, NOT_SENT, Sent
from benchmarks.attack.verdicts import Delays
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


LEFT = sent(NO_ANSWER, fault="no answer within 5 s")
WRONG = [sent("500"), sent("502"), sent("504"), LEFT]
FINE = [sent("200"), sent("400"), sent("501"), sent("503"), sent("504", deadline=1.0), sent(NOT_SENT)]


def test_statuses_that_no_client_may_cause() -> None:
    found = verdicts.of_statuses([*WRONG, *FINE, replace(LEFT, by_right=True)])
    assert [fault.partition(":")[0] for fault in found] == ["fields, number 3"] * len(WRONG)


def test_delays_memory_and_pages() -> None:
    """One slow neighbour in a hundred is allowed, two are not; a class is blamed for a stall of several limits."""
    quick, slow = [visit(0.1)] * 99, visit(9.0)
    for found, allowed in (([*quick, slow], True), ([*quick, slow, slow], False), ([], False)):
        assert (verdicts.of_delays("x", Delays.of(found), 0.3) == []) == allowed
    assert verdicts.of_class("x", Delays.of([*quick[:19], visit(0.8)]), 0.3) == []
    assert verdicts.of_class("x", Delays.of([*quick[:19], visit(0.95)]), 0.3)
    assert [len(verdicts.of_memory(100, peak, peak, 1.2)) for peak in (119, 121)] == [0, 2]
    assert verdicts.of_pages(PAGES, PAGES) == []
    assert len(verdicts.of_pages(PAGES, PAGES | {"d2sd_kv_pages_used": 1.0, "d2sd_kv_pages": 8.0})) == 2


def test_wrong_and_broken_honest_answers() -> None:
    broken = Visit(0, 0.0, error="status 500")
    assert verdicts.of_visits([visit(0.1), Visit(0, 0.0)], ["yes"]) == []  # the second one was open at the end
    assert len(verdicts.of_visits([visit(0.1, text="no"), broken], ["yes"])) == 2


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


def test_errors_of_the_log_are_counted() -> None:
    error = {"level": "error", "message": "a request failed", "error": "Traceback\n  x\nTypeError: no"}
    lines = [json.dumps(error | {"time": n}) for n in range(3)]
    lines.append(json.dumps({"event": "request", "id": "7", "status": 500, "path": "/x"}))
    assert verdicts.of_log(lines) == [
        "in the log, 3 times: a request failed: TypeError: no",
        "in the log, 1 times: status 500 of /x",
    ]
    assert verdicts.of_log(["Traceback"]) == ["in the log, 1 times: Traceback"]
