"""Tiny pairs as graphs."""

from __future__ import annotations

import pytest
import torch

from d2sd.modeling.config import Family
from tests.conftest import Once
from tests.convert.exported import Exported, ExportOnce, export_pair, tiny_pair


@pytest.fixture(scope="session")
def export_once(once: Once) -> ExportOnce:
    """Models are created for each test; graphs are shared, so tests must not write into their folder."""

    def get(family: Family, dtype: torch.dtype, *, windows: bool = False) -> Exported:
        target, drafter = tiny_pair(family, dtype, windows=windows)
        folder = once(f"exported-{family}{'-windows' * windows}", lambda folder: export_pair(folder, target, drafter))
        return Exported(folder, target, drafter)

    return get
