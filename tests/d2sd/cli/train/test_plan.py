"""What `d2sd train` reports: its plan, its progress bars, its events for TensorBoard."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from d2sd.train.loop import Trainer
from tests.convert.helpers import tree_bytes
from tests.d2sd.cli.train.helpers import PROMPTS, edit, nth_time, read, rows, train, trained, undo


def test_bars_end_where_they_said(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a first run, in one that resumes, and in one with nothing to do."""
    told: list[tuple[str, int | None, int]] = []

    @contextmanager
    def bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        counts: list[int] = []
        yield counts.append
        told.append((what, total, sum(counts)))

    monkeypatch.setattr("d2sd.cli.train.bar", bar)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", nth_time(Trainer._update, 4))
        assert train(project).exit_code == 130
    assert [(what, total) for what, total, _ in told if what in ("turns", "answers", "features")] == [
        ("turns", 8), ("answers", len(rows(project, "answers.jsonl"))), ("features", len(read(project))),
    ]  # fmt: skip
    trained(project)
    trained(project)
    assert {what for what, _, _ in told} >= {
        "prompts", "answers", "features", "training first", "training second", "evaluating chain", "evaluating d2sd",
    }  # fmt: skip
    assert [(what, total, done) for what, total, done in told if total is not None and done != total] == []


def test_the_plan_writes_nothing_and_tells_what_is_done(project: Path, finished: Path) -> None:
    before = tree_bytes(project)
    told = {line[:16].strip(): line[16:] for line in planned(project)}
    assert tree_bytes(project) == before
    assert told["target"].endswith("to be built")
    assert told["turns"] == "0 of 8 written by the target; time unknown"
    assert told["answers"] == f"0 of at most {8 + PROMPTS + 4} prompts answered; time unknown"
    assert told["features"].startswith("0 sequences stored, 0.1 MB at most")  # 21 x 24 tokens x 3 x 32 x 2 bytes
    assert told["first drafter"] == told["second drafter"] == "0 of 4 steps; time unknown"
    done = {line[:16].strip(): line[16:] for line in planned(finished)}
    assert done["target"].endswith("ready")
    assert done["turns"] == "8 of 8 written by the target"
    count = len(rows(finished, "answers.jsonl"))
    assert done["answers"] == f"{count} of {count} prompts answered"
    assert done["features"].startswith(f"{len(read(finished))} sequences stored, 0.0 MB for the responses so far")
    assert done["first drafter"] == done["second drafter"] == "4 of 4 steps"


def test_the_plan_estimates_from_what_was_measured(finished: Path) -> None:
    edit(finished, "second.steps", 1003)
    paces = [{"stage": "answers", "count": 10, "seconds": 40.0}, {"stage": "answers", "count": 10, "seconds": 20.0}]
    (finished / "work" / "pace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in paces))
    log = finished / "work" / "second.jsonl"
    log.write_text(
        "".join(json.dumps(row | {"seconds": 30 if "cells" in row else 2}) + "\n" for row in rows(finished, log.name))
    )
    answers = (finished / "work" / "answers.jsonl").read_text().splitlines()
    (finished / "work" / "answers.jsonl").write_text("\n".join(answers[:-2]) + "\n")
    told = {line[:16].strip(): line[16:] for line in planned(finished)}
    assert told["answers"].endswith("prompts answered; about 6 s left at the pace so far")
    # 999 steps of 2 s and evaluations of 30 s at 6, 9, ..., 1002: 11,988 s
    assert told["second drafter"] == "4 of 1,003 steps; about 3 h left at the pace so far"


def planned(project: Path) -> list[str]:
    result = train(project, "--plan")
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout.splitlines()


def test_events_for_tensorboard(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, list[tuple[str, float, int]]] = {}

    class Writer:
        def __init__(self, folder: Path, purge_step: int) -> None:
            self.scalars = kept.setdefault(f"{folder.name} from {purge_step}", [])
            self.add_scalar = lambda *told: self.scalars.append(told)

        def flush(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr("d2sd.train.pipeline.log.tensorboard_is_installed", lambda: True)
    undo(finished, "second")
    trained(finished)
    assert kept.keys() == {"second from 1"}, "a drafter that is trained writes nothing"
    said = kept["second from 1"]
    assert [(name, step) for name, _, step in said if name == "loss"] == [("loss", step) for step in (1, 2, 3, 4)]
    assert [step for name, _, step in said if name == "tau/d2sd"] == [3, 4]
    assert {"acceptance of d2sd/position 1", "calibration error of d2sd/second"} <= {name for name, _, _ in said}
