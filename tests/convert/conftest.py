"""A package index of the tests' own, and tiny pairs as graphs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from d2sd.modeling.config import Family
from tests.conftest import Once
from tests.convert.exported import Exported, ExportOnce, export_pair, tiny_pair


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("D2SD_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture(scope="session")
def export_once(once: Once) -> ExportOnce:
    """Models are created for each test; graphs are shared, so tests must not write into their folder."""

    def get(family: Family, dtype: torch.dtype) -> Exported:
        target, drafter = tiny_pair(family, dtype)
        folder = once(f"exported-{family}", lambda folder: export_pair(folder, target, drafter))
        return Exported(folder, target, drafter)

    return get
