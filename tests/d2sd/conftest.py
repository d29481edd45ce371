"""A tiny project and a folder for its bundles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.convert.helpers import write_project


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"
