"""Every test runs on the compiled library and on the specification in PyTorch."""

from __future__ import annotations

import pytest

from d2sd.plugins.cpu import library


@pytest.fixture(autouse=True, params=["compiled", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chooses by taking the library away."""
    if request.param == "reference":
        monkeypatch.setattr(library, "available", lambda: False)
    elif not library.available():
        pytest.skip(f"no CPU kernels: {library.load()}")
