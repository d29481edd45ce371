"""The engine one step late gives the answers of one that is never late, whatever happens to its requests."""

from __future__ import annotations

import pytest

from tests.runtime.soak import Soak


def check(soak: Soak, steps: int) -> None:
    seen = soak.run(steps)
    assert seen["late"] > steps / 3, "steps run before the tokens of the one before are read"
    assert min(seen[name] for name in ("dropped late", "stop", "length", "prefix hits")) > 0, seen


@pytest.mark.slow
def test_a_short_soak() -> None:
    check(Soak(3, rerun=True), 60)


@pytest.mark.full
@pytest.mark.slow
def test_two_thousand_steps() -> None:
    """10 CPU seconds; `make soak-steps` runs more."""
    soak = Soak(1, rerun=True)
    check(soak, 2000)
    assert soak.seen["preemptions"] > 10
    assert soak.seen["cancelled late"] > 10


@pytest.mark.slow
def test_a_soak_of_recorded_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that the host computed while a step was captured is frozen, and all memory in between overwritten."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)  # which hide their operators
    check(Soak(2, rerun=False), 150)


@pytest.mark.parametrize("windows", ["drafters", "mixed"])
def test_a_short_soak_behind_windows(windows: str) -> None:
    soak = Soak(3, rerun=True, windows=windows)
    check(soak, 60)
    assert soak.seen["freed behind windows"] > 40
