"""The table of predicted figures: what a run fills in, and that every line is about a case that there is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from benchmarks.gpu import predicted, suite, table
from benchmarks.gpu.predicted import PREDICTIONS, Prediction, compare

H100 = {"device": "NVIDIA H100 80GB HBM3"}
ROWS: dict[str, dict[str, Any]] = {
    "ceilings/copy": {"status": "ok", "gb_per_s": 3000.0},
    "a/1": {"status": "ok", "graph_ms": 6.0, "by_arithmetic_ms": {"H100": [4.0, 4.5, 5.0]}},
    "a/2": {"status": "started", "gb": 1.0},
    "first_a/2": {"status": "ok", "graph_ms": 3.0},
    "a/3": {"status": "ok", "bytes": 3 * 10**9, "times": {"plain": {"ms": 2.0}}},
}


def lines(monkeypatch: pytest.MonkeyPatch, *those: Prediction) -> list[str]:
    monkeypatch.setattr(predicted, "PREDICTIONS", those)
    return compare(H100, ROWS).splitlines()[2:]


def test_figures_stand_beside_their_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(
        monkeypatch,
        Prediction("a/1", 4.0, 8.0, "a guess"),
        Prediction("a/1", 1.0, 1.0, "a guess", over="a/2"),
        Prediction("a/3", 0.4, 0.6, "a guess", "share"),
        Prediction("a/9", 1.0, 2.0, "a guess"),
        Prediction("a/3", 1.0, 3.0, "a guess", "times.plain.ms"),
        Prediction("a/2", 1.0, 3.0, "a guess", gpu="B200"),
    ) == [
        "| a/1, graph_ms | 4 to 8 | 6 | 1.00 | a guess |",
        "| a/1, graph_ms / a/2 | 1 | 2 | 2.00 | a guess |",
        "| a/3, share | 0.4 to 0.6 | 0.5 | 1.00 | a guess |",
        "| a/9, graph_ms | 1 to 2 | – | – | a guess |",
        "| a/3, times.plain.ms | 1 to 3 | 2 | 1.00 | a guess |",
        "| a/1, graph_ms | 5 | 6 | 1.20 | arithmetic with nodes; floor 4 |",
    ]
    assert compare({"device": "none: a dry run"}, ROWS) == "Nothing was predicted for this device."


def test_every_prediction_is_of_a_case(tmp_path: Path) -> None:
    names = {key for part in suite.PARTS for key, _ in suite.cases_of(part, tmp_path, tmp_path, time.time())}
    for one in PREDICTIONS:
        assert {one.case, one.over or one.case} <= names
        assert 0 < one.low <= one.high
    assert len({(one.name, one.gpu) for one in PREDICTIONS}) == len(PREDICTIONS)


def test_every_case_has_one_name(tmp_path: Path) -> None:
    keys = [key for part in suite.PARTS for key, _ in suite.cases_of(part, tmp_path, tmp_path, time.time())]
    assert {key.split("/")[0] for key in keys} == suite.PARTS.keys()
    assert len(set(keys)) == len(keys)


def test_products_and_tensor_cores_have_lines() -> None:
    peak = 989e12
    attention = {"group": "32/8x128 bf16", "bytes": 10**9, "flops": int(peak * 1e-3)}
    found = {
        "ceilings/copy": ROWS["ceilings/copy"],
        "products/fp8 qkv r1": {
            "status": "ok",
            "bytes": 3 * 10**9,
            "times": {name: {"ms": ms, "graph": True} for name, ms in (("plain", 2.0), ("padded", 1.0))},
        },
        **{
            f"times/r{rows}": attention | {"status": "ok", "rows": rows, "times": {"ours": {"ms": 2.0, "graph": True}}}
            for rows in (16, 64)
        },
    }
    text = table.render(H100 | {"triton brought": True, "triton installed": "3.6.0"}, found)
    assert "(Triton from a pack in front of 3.6.0)" in text
    assert "| products fp8: share of copy rate | 1 | 50% (fp8 qkv r1) | 50% (fp8 qkv r1) |" in text
    assert "| products fp8: best form against the plain one | 1 | 2.00 × (fp8 qkv r1, padded) |" in text
    assert "64 rows: share of the tensor cores' peak | 1 | 50% (r64) |" in text
    assert "16 rows: share of the tensor" not in text
