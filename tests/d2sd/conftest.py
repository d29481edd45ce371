"""A tiny project and a folder for its bundles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import succeeds
from tests.conftest import Once
from tests.convert.helpers import write_project


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture(scope="session")
def built(once: Once) -> Path:
    """The bundle of a tiny project, as `d2sd build` leaves it. Nobody writes into it."""
    return once("tiny", lambda folder: succeeds("build", write_project(folder), "--out", folder / "bundle")) / "bundle"
