"""Bytes and nodes of decode steps of a hybrid, at Qwen3.5-4B's geometry."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from benchmarks.gpu.hybrid_steps import BODY, VOCABULARY, HybridStep, count_hybrid
from benchmarks.gpu.roofline import floor_bytes
from benchmarks.gpu.steps import CONTEXT
from benchmarks.gpu.traffic import KV, STATES, Launch, read, written

PAGE = Path(__file__).parents[2] / "docs" / "roofline.md"
#: The launches of a layer of either kind.
LAYER = 10
#: Of a verification besides: embeddings with the first norm, the mask in bits, the head.
BESIDES = 3


@pytest.fixture(scope="module")
def step() -> list[Launch]:
    """One request; the drafter drafts twice, so that a tree has 64 nodes."""
    return count_hybrid(HybridStep("reanchor"))


def verification(step: list[Launch]) -> list[Launch]:
    return [launch for launch in step if launch.stage == "verify"]


def test_verifying_a_tree_reads_the_state_once(step: list[Launch]) -> None:
    states, verify = BODY.state_bytes(2), verification(step)
    e, v = BODY.hidden_size, VOCABULARY
    mixer, attention = e * (8192 + 4096 + 64) + 4096 * e, e * (2 * 4096 + 2 * 1024) + 4096 * e
    weights = 2 * (24 * mixer + 8 * attention + 32 * 3 * e * 9216 + v * e)
    context = 8 * CONTEXT * 2 * 4 * 256 * 2
    assert read(verify, STATES) == states
    assert read(verify, KV) == context
    least = weights + context + states
    assert least <= floor_bytes(verify) <= least + 5e6  # norms, convolutions, rows of the embedding
    assert read(verify) <= 1.05 * least
    assert read(verify) + written(verify) <= 1.10 * least


def test_a_step_writes_the_state_once(step: list[Launch]) -> None:
    """In the commit of all layers, which reads it too."""
    size, commit = BODY.state_bytes(2), [launch for launch in step if launch.stage == "commit"]
    assert read(commit, STATES) == written(commit, STATES) == written(step, STATES) == size
    assert Counter(launch.name for launch in commit)["recurrence_kernel"] == 1


@pytest.mark.slow
def test_a_layer_is_ten_launches(step: list[Launch]) -> None:
    assert len(verification(step)) == BODY.num_layers * LAYER + BESIDES
    for kind in ("bf16", "fp8"):
        plain = count_hybrid(HybridStep("off", kind))
        assert len(verification(plain)) == BODY.num_layers * LAYER + BESIDES


def test_the_page_has_this_step(step: list[Launch]) -> None:
    cells = runpy.run_path(str(PAGE.with_suffix(".py")))["hybrid_counts"](HybridStep("reanchor"))
    assert f"| {' | '.join(cells)} |" in PAGE.read_text("utf-8").splitlines(), "run python -m docs.roofline"
