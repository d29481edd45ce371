"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest
from torch import Tensor

from d2sd.modeling.drafters.dflash import Drafter


@pytest.fixture
def layers_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs layers as on a GPU: the compiled layers of a CPU hide their operators."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Positions of the rows of every product for context, in their order."""
    found: list[tuple[int, ...]] = []
    compute = Drafter.context_keys_values

    def noted(self: Drafter, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        found.append(tuple(positions.flatten().tolist()))
        return compute(self, features, positions)

    monkeypatch.setattr(Drafter, "context_keys_values", noted)
    return found
