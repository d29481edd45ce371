"""`d2sd train --only`: answers and drafters by themselves, and then the rest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands import passed
from tests.convert.helpers import tree_bytes
from tests.d2sd.cli.train.helpers import SETTINGS, edit, rows, train


def test_the_stages_one_by_one_end_in_the_same_bytes(
    project: Path, whole: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters are not evaluated while they are trained, and the target is not asked again."""
    shutil.copytree(whole / "work" / "target", project / "work" / "target")
    passed(train(project, "--only", "answers"))
    assert not (project / "out").exists()
    assert rows(project, "answers.jsonl") == rows(whole, "answers.jsonl")

    def refuse(*args: object, **kwargs: object) -> Any:
        raise AssertionError("no response is missing")

    with monkeypatch.context() as patch:
        patch.setattr("d2sd.runtime.engine.Engine.submit", refuse)
        passed(train(project, "--only", "drafters"))
    made = tree_bytes(project / "out")
    assert {name for name in made if "/" in name} == {name for name in expected if "/" in name}
    assert all(made[name] == expected[name] for name in made)
    assert all("cells" not in row for row in rows(project, "first.jsonl"))
    passed(train(project))
    found = tree_bytes(project / "out")
    assert {name: found[name] for name in expected if "curves" not in name} == {
        name: content for name, content in expected.items() if "curves" not in name
    }


def test_drafters_take_the_responses_there_are(project: Path, whole: Path) -> None:
    """Two thirds of them, and not all turns."""
    work = project / "work"
    shutil.copytree(whole / "work" / "target", work / "target")
    lines = (whole / "work" / "answers.jsonl").read_text().splitlines(keepends=True)
    (work / "answers.jsonl").write_text("".join(lines[: len(lines) * 2 // 3]))
    passed(train(project, "--only", "drafters"))
    assert (project / "out" / "second" / "model.safetensors").exists()
    assert not (work / "turns.jsonl").exists()
    assert len(rows(project, "answers.jsonl")) == len(lines) * 2 // 3


def test_states_are_kept_by_the_share_of_the_seconds(
    project: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of the first drafter takes a quarter of its time: one state for all shares that passed meanwhile."""
    for part in ("target", "answers.jsonl"):
        source, to = whole / "work" / part, project / "work" / part
        to.parent.mkdir(exist_ok=True)
        shutil.copytree(source, to) if source.is_dir() else shutil.copy(source, to)
    timed = SETTINGS | {"steps": 100, "seconds": 10.0}
    edit(project, "first", timed)
    edit(project, "second", timed | {"rejections": "matched"})
    monkeypatch.setattr("d2sd.train.loop.reached", lambda settings, step, begun: min(settings.steps, 25 * step))
    passed(train(project, "--only", "drafters"))
    kept = {path.name for path in (project / "work" / "first").glob("step-*")}
    assert kept == {f"step-{step}.safetensors" for step in (20, 40, 75)}
    assert [row["step"] for row in rows(project, "first.jsonl")] == [1, 2, 3, 4]
