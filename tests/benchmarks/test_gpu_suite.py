"""The GPU suite's frame: cases, time, resumption, the probe and the scripts, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import proofs, suite
from benchmarks.gpu.cases import LOST, Skip, run_cases
from benchmarks.gpu.probe import answer
from benchmarks.gpu.record import Record
from d2sd.errors import D2SDError

ROOT = Path(__file__).parents[2]
HERE = {"device": "H200", "torch": "2.11", "triton": "3.6", "code": "abc"}


def statuses(folder: Path) -> dict[str, str]:
    return {key: row["status"] for key, row in Record(folder).rows.items()}


def broken(note: Callable[..., None]) -> dict[str, Any]:
    note(half=1)
    raise ValueError("no such thing\nsecond line")


def absent(_: Callable[..., None]) -> dict[str, Any]:
    raise Skip("too large")


def test_every_case_ends_in_its_row(tmp_path: Path) -> None:
    run_cases(Record(tmp_path), [("a/1", lambda note: {"ms": 2}), ("a/2", broken), ("a/3", absent)], time.time() + 60)
    rows = Record(tmp_path).rows
    assert (rows["a/1"]["status"], rows["a/1"]["ms"]) == ("ok", 2)
    assert rows["a/2"] == {"half": 1, "status": "failed", "reason": "ValueError: no such thing"}
    assert rows["a/3"] == {"status": "skipped", "reason": "too large"}


def test_no_case_begins_when_time_is_up(tmp_path: Path) -> None:
    def slow(_: Callable[..., None]) -> dict[str, Any]:
        time.sleep(1.1)
        return {}

    run_cases(Record(tmp_path), [("a/1", slow), ("a/2", slow)], time.time() + 1)
    assert statuses(tmp_path) == {"a/1": "ok", "a/2": "no time"}


def test_a_second_call_measures_what_is_missing(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.resume(HERE)
    run_cases(record, [("a/1", lambda note: {"ms": 2}), ("a/2", broken)], time.time() + 60)
    again = Record(tmp_path)
    again.resume(HERE)
    run_cases(again, [(key, lambda note: {"ms": 7}) for key in ("a/1", "a/2")], time.time() + 60)
    assert {key: row["ms"] for key, row in Record(tmp_path).rows.items()} == {"a/1": 2, "a/2": 7}


def test_parts_that_time_nothing_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a folder of its own; what they found is in one record, with what an earlier call measured."""
    checks = [name for name, part in suite.PARTS.items() if part.call == 1 and not part.timed]
    together = threading.Barrier(len(checks))

    def process(arguments: list[str], seconds: float) -> int:
        if arguments[1] in checks:
            together.wait(timeout=20)
        Record(Path(arguments[arguments.index("--out") + 1])).put(f"{arguments[1]}/1", "ok")
        return 0

    monkeypatch.setattr(suite, "_process", process)
    monkeypatch.setattr(suite, "refused", lambda *_: False)
    monkeypatch.setattr(suite, "report", lambda *_: 0)
    assert suite.main(["--dry", "--call", "1", "--only", "checks", "--out", str(tmp_path)]) == 0
    assert statuses(tmp_path) == {f"{name}/1": "ok" for name in checks}
    timed = [name for name, part in suite.PARTS.items() if part.call == 1 and part.timed]
    assert suite.main(["--dry", "--call", "1", "--only", "times", "--out", str(tmp_path)]) == 0
    assert statuses(tmp_path) == {f"{name}/1": "ok" for name in timed}, "a dry run begins anew"


def test_figures_of_two_machines_do_not_mix(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.resume(HERE)
    record.put("a/1", "ok")
    with pytest.raises(D2SDError, match="device"):
        Record(tmp_path).resume(HERE | {"device": "H100"})
    record.path.write_text("{}")
    with pytest.raises(D2SDError, match="no key d2sd_bench"):
        Record(tmp_path)


def test_a_part_goes_on_behind_a_case_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes: one dies in its second case, one loses the device in its third, one ends well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    ends: list[tuple[list[tuple[str, str]], int]] = [
        ([("ceilings/1", "ok"), ("ceilings/2", "started")], -11),
        ([("ceilings/3", "failed")], LOST),
        ([("ceilings/4", "ok")], 0),
    ]

    def process(arguments: list[str], seconds: float) -> int:
        assert 0 < seconds <= suite.PARTS["ceilings"].seconds + suite.GRACE
        rows, status = ends.pop(0)
        for key, value in rows:
            Record(tmp_path).put(key, value)
        return status

    monkeypatch.setattr(suite, "_process", process)
    suite.run_part("ceilings", tmp_path, tmp_path, time.time() + 400)
    assert statuses(tmp_path) == {"ceilings/1": "ok", "ceilings/2": "died", "ceilings/3": "failed", "ceilings/4": "ok"}
    assert Record(tmp_path).rows["ceilings/2"]["reason"] == "its process ended with -11"
    ends.append(([], 1))  # dies outside of any case: it would do so for ever
    suite.run_part("ceilings", tmp_path, tmp_path, time.time() + 400)
    assert statuses(tmp_path)["ceilings/all"] == "died"
    suite.run_part("flex", tmp_path, tmp_path, time.time() + suite.GRACE - 1)
    assert statuses(tmp_path)["flex/all"] == "no time"


def sleeper(folder: Path, end: str) -> Path:
    """A program that begins another one, writes the id of that to `folder`/child, and ends by `end`."""
    program = folder / "sleeper"
    program.write_text(f"#!/bin/sh\nsleep 60 & echo $! >{folder}/child\n{end}\n")
    program.chmod(0o755)
    return program


def child_lives(folder: Path) -> bool:
    time.sleep(0.5)
    stat = Path(f"/proc/{(folder / 'child').read_text().strip()}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


@pytest.mark.parametrize(("end", "ended"), [("wait", "its time"), ("exit 3", 3)])
def test_a_process_is_ended_with_its_children(
    end: str, ended: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(sleeper(tmp_path, end)))
    assert suite._process([], 3.0) == ended
    assert not child_lives(tmp_path)


def test_pytest_lines_are_counted_also_of_a_cut_run() -> None:
    output = (
        "collecting ... collected 4 items\n\ntests/a.py::test_x[GQA 3:1, a page full] PASSED [ 25%]\n"
        "tests/a.py::test_y FAILED   [ 50%]\ntests/a.py::test_z SKIPPED (no GPU)  [ 75%]\ntests/a.py::test_w "
    )
    assert proofs.counted(output) == {"passed": 1, "failed": 1, "error": 0, "skipped": 1}


def test_a_probes_answer() -> None:
    fine = {"step": "validity", "ok": True, "said": "", "found": ""}
    refused = fine | {"ok": False, "said": "unsupported"}
    ran = {"step": "execute", "ok": True, "said": "", "found": "0.0002"}
    assert answer([fine, ran], "") == "runs, relative error 0.0002"
    assert answer([refused, ran], "") == "runs, relative error 0.0002; but validity: unsupported"
    assert answer([refused], "") == "validity: unsupported"
    assert answer([fine], "exit status -11 (in silence)") == "exit status -11 (in silence) after validity"


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "benchmarks" / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHON": sys.executable} | environment,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is what it says without a GPU")
@pytest.mark.slow
def test_the_suite_without_a_gpu_says_why(tmp_path: Path) -> None:
    """The whole script, seconds of budget: every row has a reason, the probe an answer or how to carry it."""
    done = script("gpu_suite.sh", "--out", str(tmp_path), "--budget", "60", KEEP=str(tmp_path / "keep"))
    found = json.loads((tmp_path / "gpu.json").read_text())
    rows = found["rows"]
    assert found["environment"]["device"] is None
    for part in suite.PARTS.keys() - {"probe"}:
        assert rows[f"{part}/all"] == {"status": "skipped", "reason": "no CUDA device"}
        assert f"- {part}/all: skipped, no CUDA device" in done.stdout
    if find_spec("tensorrt_rtx") is None:
        assert "gpu_pack.sh pack rtx" in rows["probe/current"]["reason"]
    else:
        assert rows["probe/current"]["answer"].startswith("driver: ")
        assert [step["step"] for step in rows["probe/current"]["steps"]] == ["driver", "build"]
        assert "gpu_pack.sh pack rtx" in rows["probe/portable"]["reason"]
    assert done.returncode == 0, done.stderr
