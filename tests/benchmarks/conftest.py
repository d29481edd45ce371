"""Environment variables that the GPU suite sets are restored after each test."""

from __future__ import annotations

import pytest

from d2sd.plugins import dispatch


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the variable behind the test; a suite that ran in this process would forbid others' fallbacks."""
    monkeypatch.setenv(dispatch.NO_FALLBACK, "")
