"""Step times are measured once and read afterwards; a file that is damaged, or cannot be written, stops no engine."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from d2sd.bundle.step_times import kept_step_times
from d2sd.policies import DrafterRole
from d2sd.runtime.cuda_graphs.steps import DecodeSteps
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.policy import Chain, DDTree, Hybrid, Off, Policy
from d2sd.runtime.step_times import StepTimes
from tests.runtime.helpers import honest, make_engine

POLICIES: list[Policy] = [Off(1), Chain(4), DDTree(8), Hybrid(8, 2)]
SIZES = [1, 2]
TIMES = StepTimes(
    {(policy, size): 0.1 * size / 3 for policy in POLICIES for size in SIZES if policy.name != "hybrid" or size == 1},
    {(POLICIES[0], 1): 1e-7, (POLICIES[2], 2): 0.0},
    {DrafterRole.FIRST: 1e-5, DrafterRole.SECOND: 2e-5},
)


class Measured:
    """`measure_step_times`, counted."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *arguments: object) -> StepTimes:
        self.count += 1
        return TIMES

    def asked(self, path: Path) -> bool:
        """Whether an engine with this file has to measure; the times are those of TIMES either way."""
        before, limits = self.count, Limits(2, 64, 4, 16)
        assert kept_step_times(path, cast("ModelRunner", None), POLICIES, {}, limits) == TIMES
        return self.count > before


@pytest.fixture(autouse=True)
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the load average of the machine, which has two processors; 0 until it is called."""

    def set_to(average: float) -> None:
        monkeypatch.setattr("os.getloadavg", lambda: (average, 0.0, 0.0))

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    set_to(0.0)
    return set_to


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    made = Measured()
    monkeypatch.setattr("d2sd.bundle.step_times.measure_step_times", made)
    return made


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "d2sd")
    return lambda: [record.getMessage() for record in caplog.records][-1]


def test_a_second_start_reads_what_the_first_measured(
    measured: Measured, tmp_path: Path, told: Callable[[], str]
) -> None:
    path = tmp_path / "new" / "folder" / "times.json"
    assert measured.asked(path)
    assert str(path) in told()
    assert not measured.asked(path)
    assert f"delete {path}" in told()
    assert [one.name for one in path.parent.iterdir()] == ["times.json"]
    path.unlink()
    assert measured.asked(path)


def changed(**values: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | values)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1]",
        lambda text: "\0" * 99,
        changed(seconds=[["off", 1, 0.1]]),
        changed(seconds=[["off", 1, 0.1], ["off", 2, 0.0]]),
        changed(seconds=[["off", 1, 0.1], ["off", 2, 1e999]]),
        changed(pending=[-1.0]),
        changed(context={"1": "much"}),
        changed(d2sd_step_times=2),
        changed(more=1),
    ],
)
def test_a_damaged_file_is_measured_again_and_replaced(
    measured: Measured, damage: Callable[[str], str], tmp_path: Path
) -> None:
    path = tmp_path / "times.json"
    assert measured.asked(path)
    path.write_text(damage(path.read_text()))
    assert measured.asked(path)
    assert not measured.asked(path)


def test_times_of_a_busy_machine_serve_until_it_is_quiet(
    measured: Measured, load: Callable[[float], None], tmp_path: Path
) -> None:
    path = tmp_path / "times.json"
    load(2.5)
    assert measured.asked(path)
    assert not measured.asked(path)
    load(1.5)
    assert measured.asked(path)
    load(2.5)
    assert not measured.asked(path)


@pytest.mark.parametrize("name", ["file/times.json", "/proc/self/times.json", "folder"])
def test_a_place_that_cannot_be_written_keeps_nothing_and_says_so(
    measured: Measured, name: str, tmp_path: Path, told: Callable[[], str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert measured.asked(tmp_path / name)
    assert "cannot keep them" in told()
    assert measured.asked(tmp_path / name)


def test_an_engine_measures_real_models_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_engine(honest()), make_engine(honest())
    for engine in (first, second):
        engine.enable_auto(POLICIES[:2], {"chain": ([9.0], [9.0])}, measure=partial(kept_step_times, tmp_path / "t"))
        monkeypatch.setattr("d2sd.bundle.step_times.measure_step_times", None)
    assert first.selector is not None
    assert second.selector is not None
    assert first.selector.times == second.selector.times


def test_guesses_are_not_kept_and_the_next_start_measures_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were measured are not measured again, and in the end the file is whole."""
    path, given = tmp_path / "times.json", list[dict[tuple[Policy, int], float] | None]()
    first = {(POLICIES[0], 1), (POLICIES[0], 2), (POLICIES[1], 1)}

    def measure(*arguments: Any) -> StepTimes:
        known: StepTimes | None = arguments[-1]
        given.append(None if known is None else dict(known.seconds))
        guessed = TIMES.seconds.keys() - first if known is None else frozenset()
        return replace(TIMES, guessed=frozenset(guessed))

    monkeypatch.setattr("d2sd.bundle.step_times.measure_step_times", measure)
    limits = Limits(2, 64, 4, 16)
    for _ in range(3):
        times = kept_step_times(path, cast("ModelRunner", None), POLICIES, {}, limits)
        assert times.seconds == TIMES.seconds
    assert given == [None, {step: TIMES.seconds[step] for step in first}]
    assert not times.guessed


def test_a_partial_file_of_a_busy_machine_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[float], None]
) -> None:
    path, given = tmp_path / "times.json", list[StepTimes | None]()

    def measure(*arguments: Any) -> StepTimes:
        given.append(arguments[-1])
        return replace(TIMES, guessed=frozenset({(POLICIES[2], 2)}))

    monkeypatch.setattr("d2sd.bundle.step_times.measure_step_times", measure)
    for average in (2.5, 2.5, 0.0):
        load(average)
        kept_step_times(path, cast("ModelRunner", None), POLICIES, {}, Limits(2, 64, 4, 16))
    assert [known is None for known in given] == [True, False, True]


def test_measuring_is_announced_where_nobody_asked_for_logs(
    measured: Measured, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python shows warnings on stderr where logging is not set up, as by `LLM`: one line, and what helps."""
    assert measured.asked(tmp_path / "times.json")
    (shown,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert re.search(r"at most 10 s, with \d+ threads .*OMP_NUM_THREADS", shown)
    assert not measured.asked(tmp_path / "times.json")
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_times_of_a_refused_capture_are_not_kept(tmp_path: Path, measured: Measured) -> None:
    path, limits = tmp_path / "times.json", Limits(2, 64, 4, 16)
    for refused in (True, True, False, False):
        steps = cast("DecodeSteps", SimpleNamespace(refused=refused))
        assert kept_step_times(path, cast("ModelRunner", None), POLICIES, {}, limits, steps=steps) == TIMES
    assert measured.count == 3
