"""A tiny project, and one whose training has ended: once a run, for all workers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import passed
from tests.conftest import Once
from tests.convert.helpers import tree_bytes
from tests.d2sd.cli.train.helpers import draw, train, write_training


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2sd.train.pipeline.run.plot_training", draw)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_training(tmp_path / "project")


@pytest.fixture(scope="session")
def whole(once: Once) -> Path:
    """A project whose training has ended, uninterrupted; what it printed is in `stdout` and `stderr` beside it. Copy
    it before changing it.
    """

    def make(folder: Path) -> None:
        project = write_training(folder / "project")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("d2sd.train.pipeline.run.plot_training", draw)
            result = passed(train(project))
        (folder / "stdout").write_text(result.stdout)
        (folder / "stderr").write_text(result.stderr)

    return once("training", make) / "project"


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "finished"))


@pytest.fixture
def expected(whole: Path) -> dict[str, bytes]:
    """The bytes of an uninterrupted run."""
    return tree_bytes(whole / "out")
