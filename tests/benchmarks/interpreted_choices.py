"""The suite's comparison of trees and choices, under Triton's interpreter: tiny shapes, and no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.gpu import choices, timing
from benchmarks.gpu.call import Wrong
from d2sd.plugins.choice.triton import launch as tokens
from d2sd.plugins.trees.triton import launch as trees


def once(run: Callable[[], Any]) -> tuple[float, bool]:
    run()
    return 0.5, True


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "once", once)
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)
    for name, value in (("BATCHES", (1,)), ("VOCABS", (70,)), ("SIZE", 3), ("BRANCHES", 2), ("WIDTH", 2), ("NODES", 6)):
        monkeypatch.setattr(choices, name, value)
    monkeypatch.setattr(choices, "SLOTS", 2)


def nothing(*_: Any, **__: Any) -> None:
    pass


def on_cpu(measure: Any) -> dict[str, Any]:
    row: dict[str, Any] = measure(nothing, device="cpu")
    return row


def test_the_kernels_pass_their_checks() -> None:
    rows = {key: on_cpu(run) for key, run in choices.cases() if "T=1" not in key}
    assert len(rows) == 10
    assert all(set(row["times"]) == {"ours", "pytorch"} for row in rows.values())


@pytest.mark.parametrize("name", ["merge", "grow", "choose greedy"])
def test_wrong_kernels_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is off by the least there is: the last node has another score, the last token is another."""
    for launch in ("candidates_triton", "growth_triton"):
        right = getattr(trees, launch)

        def wrong(*given: Any, right: Any = right) -> Any:
            columns = right(*given)
            columns.score[-1, -1] += 1.0
            columns.num_merged[-1] += 1
            return columns

        monkeypatch.setattr(trees, launch, wrong)
    choose = tokens.choose_triton
    monkeypatch.setattr(tokens, "choose_triton", lambda *given: choose(*given) + 1)
    run = next(run for key, run in choices.cases() if name in key)
    with pytest.raises(Wrong):
        on_cpu(run)
