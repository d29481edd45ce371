"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def layers_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs layers as on a GPU: the compiled layers of a CPU hide their operators."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)
