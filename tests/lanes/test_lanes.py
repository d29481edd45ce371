"""Lanes are what they say: their commands and paths exist, nothing of the product is in none, and red is seen."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lanes import __main__ as command
from tests.lanes.lane import PYTEST, ROOT, Lane, Stamp, counted, git, state
from tests.lanes.table import LANES, PRODUCT


def lane(counts: str = PYTEST) -> Lane:
    return Lane("", ("test",), ("README.md",), 1, counts)


@pytest.mark.parametrize(
    ("output", "status", "found"),
    [
        ("===== 3 passed, 1 skipped in 2.10s =====", 0, (3, 0, 1)),
        ("\x1b[31m= \x1b[1m2 failed\x1b[0m, 7 passed, 4 skipped, 1 error in 600.10s (0:10:00) =", 1, (7, 3, 4)),
        ("2 passed in 1s\n5 passed, 1 skipped in 3.1s", 0, (7, 0, 1)),
        ("3 passed in 1s", 2, (3, 1, 0)),
        ("make: *** No module named 'openai'", 2, (0, 1, 0)),
        ("no tests ran in 0.10s", 0, (0, 1, 0)),
        ("12 deselected in 0.10s", 5, (0, 1, 0)),
        ("we passed 3 times in 1 hour", 0, (0, 1, 0)),
        ("Found 3 errors in 2 files (checked 9 source files)\n4 passed, 2 warnings in 1.5s", 0, (4, 0, 0)),
    ],
)
def test_what_a_run_says_is_counted(output: str, status: int, found: tuple[int, int, int]) -> None:
    assert counted(lane(), output, status) == found


@pytest.mark.parametrize(
    ("name", "output", "found"),
    [
        ("kernels", "1222 keep every rule, 9 unchanged since; 4 break a bound or a rule", (1222, 4, 0)),
        ("mutants", "158 mutants, 7 of them explained survivors; 2400 s\n2 not as expected", (158, 2, 0)),
        ("mutants", "158 mutants, 7 of them explained survivors; 2400 s\nall as expected", (158, 0, 0)),
        ("differential", "60012 steps, 512 episodes, 1 differing, 0 leaked", (60012, 1, 0)),
        ("soak-steps", "1000 steps, 3 s: {}\n2000 steps, 0 differ\n500 steps, 0 differ", (2500, 0, 0)),
        ("attack", "5300 requests sent, 2 faults", (5300, 2, 0)),
        ("gpu-dry", "45 cases: 40 ok, 5 skipped, 0 failed", (40, 0, 5)),
        ("step-files", "43 files in a step of hybrid on a CPU", (43, 0, 0)),
    ],
)
def test_programs_that_are_no_tests_say_how_much_they_did(name: str, output: str, found: tuple[int, int, int]) -> None:
    assert counted(LANES[name], output, 0) == found


def test_their_commands_are_targets_of_make() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.M)
    assert {one.command[0] for one in LANES.values()} <= set(targets)


@pytest.mark.parametrize("name", LANES)
def test_what_they_cover_exists(name: str) -> None:
    for path in {one.removeprefix(":!") for one in LANES[name].covers}:
        assert git("ls-files", "--", path), path


def test_each_part_of_the_product_is_covered_by_more_than_ci() -> None:
    covered = {path for name, one in LANES.items() if name not in ("test", "test-slow") for path in one.covers}
    assert set(PRODUCT) <= covered


def test_a_lane_is_stale_when_what_it_covers_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = Stamp(git("rev-parse", "HEAD"), "2026-11-26", 1, 0, 0, 1)
    files = [""]
    monkeypatch.setattr("tests.lanes.lane.git", lambda *arguments: files[0])
    assert state(lane(), None) == "never run"
    assert state(lane(), stamp) == "green"
    files[0] = "README.md\nREADME.txt"
    assert state(lane(), stamp) == "stale: README.md and 1 more"
    assert state(lane(), Stamp(stamp.commit, "2026-11-26", 9, 1, 0, 1)) == "red"


def test_words_make_no_lane_stale_that_covers_no_documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = {"diff": "one.py\nnew.py", "show": '"""Words."""\na = 1  # of it'}

    def git(kind: str, *arguments: str) -> str:
        if arguments[-1].endswith(":new.py"):
            raise subprocess.CalledProcessError(128, "git")
        return told[kind]

    monkeypatch.setattr("tests.lanes.lane.git", git)
    monkeypatch.setattr("tests.lanes.lane.ROOT", tmp_path)
    (tmp_path / "one.py").write_text('"""Other words."""\na = 1\n')
    (tmp_path / "new.py").write_text("a = 1\n")
    stamp, documents = Stamp("c0ffee", "2026-11-28", 1, 0, 0, 1), replace(lane(), covers=(".",))
    assert state(lane(), stamp) == "stale: new.py"
    assert state(documents, stamp) == "stale: one.py and 1 more"
    (tmp_path / "one.py").write_text("a = 2\n")
    assert state(lane(), stamp) == "stale: one.py and 1 more"
    (tmp_path / "one.py").unlink()
    assert state(lane(), stamp) == "stale: one.py and 1 more"


def test_an_unknown_commit_is_stale() -> None:
    assert state(lane(), Stamp("0" * 40, "2026-11-26", 1, 0, 0, 1)) == "stale: its commit is unknown"


def test_a_run_is_stamped_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "STAMPS", tmp_path / "checks.json")
    monkeypatch.setattr(command, "PAGE", tmp_path / "checks.md")
    monkeypatch.setattr(command, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(command, "git", lambda *arguments: "" if arguments[0] == "status" else "c0ffee")
    opened = subprocess.Popen

    def popen(_: list[str], **settings: object) -> object:
        command.write({"kernels": Stamp("deadbeef", "2026-11-26", 7, 0, 0, 1)})  # another process's, meanwhile
        return opened(["echo", "1 failed, 2 passed in 3.10s"], **settings)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert command.main(["ptx"]) == 1
    stamps = json.loads((tmp_path / "checks.json").read_text())
    stamp = stamps["ptx"]
    assert stamps["kernels"]["passed"] == 7
    assert (stamp["commit"], stamp["passed"], stamp["failed"]) == ("c0ffee", 2, 1)
    assert "| `ptx` |" in (tmp_path / "checks.md").read_text()
    assert "2 passed" in (tmp_path / "logs" / "ptx.log").read_text()
    assert capsys.readouterr().out.endswith("red: ptx\n")
    assert command.main(["nope"]) == 2


def test_a_stamp_names_a_commit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "git", lambda *_: " M README.md")
    assert command.main(["ptx"]) == 2
    assert "commit first" in capsys.readouterr().err


def test_the_page_is_of_the_stamps() -> None:
    assert command.PAGE.read_text("utf-8") == command.page(command.read_stamps())


def test_ci_runs_what_readme_says() -> None:
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    assert "make test" in commands, "alone, with no selection of CI's own"
    assert any(line.endswith("make test-slow") for line in commands[commands.index("make test") + 1 :])
