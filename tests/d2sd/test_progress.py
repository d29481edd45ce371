"""Progress where nobody looks at a terminal: a log says once a minute how far long work is."""

from __future__ import annotations

import pytest

from d2sd import progress


def test_a_log_has_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a minute a unit of eight: every second one writes a line, with what is left at this pace."""
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    with progress.bar("answers", 8) as advance:
        for _ in range(8):
            now[0] += 30
            advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "answers: 25%, 3 min left, 1 min so far",
        "answers: 50%, 2 min left, 2 min so far",
        "answers: 75%, 1 min left, 3 min so far",
        "answers: 100%, 0 min left, 4 min so far",
    ]


def test_short_work_leaves_a_log_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Below a minute nothing is written; without a total a line has the count."""
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    with progress.bar("loading") as advance:
        now[0] = 59.0
        advance(1)
        assert capsys.readouterr().err == ""
        now[0] = 61.0
        advance(4_999)
    assert capsys.readouterr().err == "loading: 5,000, 1 min so far\n"
