"""The GPU suite's dry run goes through the code around the launches, and finds what is wrong there."""

from __future__ import annotations

import math
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from benchmarks.gpu import ceilings, dry, suite, writes
from benchmarks.gpu.page import cases as table_of
from benchmarks.gpu.record import Record


def nothing(**figures: object) -> None:
    pass


def run(part: str, folder: Path, most: int) -> dict[str, dict[str, Any]]:
    cases = islice(suite.cases_of(part, folder, folder, time.time() + 60), most)
    return {key: {"status": "ok", **measure(nothing)} for key, measure in dry.dry(cases)}


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "most"),
    [
        ("ceilings", 7),
        ("budgets", 9),
        ("checks", 3),
        ("replay", 3),
        ("layers", 8),
        ("choices", 20),
        ("steps", 6),
        ("first_steps", 7),
        ("times", 3),
        ("writes", 5),
        ("flex", 2),
    ],
)
def test_cases_run_without_a_gpu(part: str, most: int, tmp_path: Path) -> None:
    """The first of each part; `make gpu-suite DRY=1` runs them all."""
    rows = run(part, tmp_path, most)
    assert len(rows) == most
    assert not dry.errors(rows)
    assert "| case | figures |" in table_of({}, rows | {ceilings.KEY: {"status": "ok", "gb_per_s": math.nan}})


def test_a_typo_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "write_pages_triton", lambda **_: undefined())  # type: ignore[name-defined]  # noqa: F821
    with pytest.raises(NameError):
        run("writes", tmp_path, 1)
    failed = {"times/x": {"status": "ok", "reasons": {"a": "Skip: no package", "b": "NameError: no name"}}}
    assert dry.errors(failed) == ["times/x, b: NameError: no name"]


def test_a_dry_run_does_not_continue_a_record_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(tmp_path)
    record.resume(suite.environment() | {"device": "H100"})
    record.put("ceilings/copy", "ok")
    assert suite.main(["--dry", "--out", str(tmp_path)]) == 2
    assert "another environment" in capsys.readouterr().err
    assert Record(tmp_path).rows["ceilings/copy"]["status"] == "ok"
