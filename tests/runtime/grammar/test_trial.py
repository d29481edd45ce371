"""The process that tries grammars: it ends with a hostile one, or when nobody waits for its answer."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Timer

import pytest

from d2sd.errors import D2SDError
from d2sd.runtime.grammar import trial as module
from d2sd.runtime.grammar.guidance import _LIMITS, _definition
from d2sd.runtime.grammar.trial import Abandoned, Trial
from tests.runtime.grammar.tokens import END, tokenizer, vocab_size

#: Takes minutes.
ENDLESS = json.dumps({"allOf": [{"properties": {"p": {"type": "string", "pattern": f".*{i}.*"}}} for i in range(16)]})


def made() -> Trial:
    return Trial({"definition": _definition(tokenizer()), "vocab_size": vocab_size(), "end_tokens": [END]})


@pytest.fixture
def trial() -> Iterator[Trial]:
    one = made()
    yield one
    one.close()


def regex(pattern: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def schema(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(text)


def processes_of(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_grammar_that_takes_too_long_ends_its_process_and_the_next_has_another(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trial.problem(regex("a+"), _LIMITS) == ""
    first = trial._process
    assert trial.problem(regex("b+"), _LIMITS) == ""
    assert trial._process is first
    monkeypatch.setattr(module, "SECONDS", 0.2)
    assert "more than 0.2 s" in trial.problem(schema(ENDLESS), _LIMITS)
    assert first is not None
    assert not processes_of(first.pid)
    assert trial.problem(regex("a+"), _LIMITS) == ""
    assert trial._process is not first


def test_a_process_that_was_killed_is_replaced(trial: Trial) -> None:
    trial.problem(regex("a+"), _LIMITS)
    assert trial._process is not None
    trial._process.kill()
    trial._process.wait()
    assert trial.problem(regex("a+"), _LIMITS) == ""


def test_work_that_nobody_waits_for_ends(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 100.0)
    trial.problem(regex("a+"), _LIMITS)
    assert trial._process is not None
    pid, stop = trial._process.pid, Event()
    Timer(0.1, stop.set).start()
    begun = time.thread_time()
    with pytest.raises(Abandoned):
        trial.problem(schema(ENDLESS), _LIMITS, stop)
    assert time.thread_time() - begun < 1
    assert not processes_of(pid)
    with pytest.raises(Abandoned):
        trial.problem(regex("a+"), _LIMITS, stop)


def test_a_process_that_is_too_slow_for_the_clock_is_ended(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.problem(regex("a+"), _LIMITS)
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    monkeypatch.setattr(module, "SECONDS", 100.0)
    assert "more than 0.1 s" in trial.problem(schema(ENDLESS), _LIMITS)
    assert trial._process is None


def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "child.py"
    broken.write_text("import no_such_package")
    for name, value in (("_PROGRAM", str(broken)), ("python_command", lambda program: [str(tmp_path / "none")])):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            with pytest.raises(D2SDError, match="does not start"):
                trial.problem(regex("a+"), _LIMITS)
    assert trial.problem(regex("a+"), _LIMITS) == ""


@pytest.mark.usefixtures("hostile_folder")
@pytest.mark.parametrize("name", ["", "/opt/triton_python_backend_stub"])
def test_a_program_that_embeds_python_finds_the_interpreter(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, "executable", name)
    assert trial.problem(regex("a+"), _LIMITS) == ""


def test_memory_is_bounded(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array is unrolled before any limit of llguidance applies; counts this large are refused earlier."""
    monkeypatch.setattr(module, "SECONDS", 100.0)
    array = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 10**8})
    assert "too much memory" in trial.problem(schema(array), _LIMITS)


@pytest.mark.slow
def test_the_process_ends_with_its_owner() -> None:
    one = made()
    one.problem(regex("a+"), _LIMITS)
    assert one._process is not None
    pid = one._process.pid
    del one
    gc.collect()
    assert not processes_of(pid)
