"""The GPU suite's check of captured steps, with recorded operators in place of CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import captured
from tests.runtime.recorded_graphs import RecordedGraphs


@pytest.fixture(autouse=True)
def layers_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the compiled kernels of a CPU hide their operators."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)


def nothing(**figures: object) -> None:
    pass


@pytest.mark.slow
def test_answers_of_all_three_are_equal() -> None:
    found = captured.served("d2sd", torch.float32, nothing, "cpu", lambda device: RecordedGraphs(), 6)
    assert {name: share for name, share in found.items() if "_to_" in name} == dict.fromkeys(
        ("equal_to_eager", "eager_to_cpu", "captured_to_cpu"), 1.0
    )
    assert len(list(captured.cases())) == 2 * len(captured.POLICIES)


@pytest.mark.slow
def test_graphs_that_ignore_their_inputs_are_found() -> None:
    """Every replay repeats the first step of its kind."""

    class Stale(RecordedGraphs):
        def __call__(self, run):  # type: ignore[no-untyped-def]
            out, replay = super().__call__(run)
            replay()
            return out, lambda: None

    with pytest.raises(AssertionError, match="differ"):
        captured.served("chain", torch.float32, nothing, "cpu", lambda device: Stale(), 4)
