"""A page of results has the figures of its JSON files: the page of 2026-11-26 was written before this writer was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.gpu.page import cases, main

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = RESULTS / "gpu-2026-11-26-h200.md"
RAW = sorted(PAGE.with_suffix("").glob("*.json"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "page.md"
    done = CliRunner().invoke(main, [*map(str, RAW), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out.read_text()


def test_every_line_of_the_tables_is_written(written: str) -> None:
    tables = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    assert len(tables) == 31
    missing = [line for line in tables if line not in written]
    assert not missing


def test_what_is_missing_is_said(written: str) -> None:
    assert written.startswith("# NVIDIA H200, 2026-11-26\n")
    assert "- endtoend/bf16: died, " in written
    assert "- read: 4,393 GB/s (1980 MHz" in written
    auto = next(line for line in written.splitlines() if line.startswith("| `auto`") and "," in line.split("|")[2])
    assert auto.split(" | ")[-1] == "2.75, 0.57, 0.77, 1.73 |"  # with 32 in flight


def test_cards_are_not_mixed(tmp_path: Path) -> None:
    other = json.loads(RAW[0].read_text())
    other["environment"]["device"] = "NVIDIA L4"
    (tmp_path / "other.json").write_text(json.dumps(other))
    done = CliRunner().invoke(main, [str(RAW[0]), str(tmp_path / "other.json"), "--out", str(tmp_path / "page.md")])
    assert done.exit_code == 2
    assert "several cards" in done.output
    assert not (tmp_path / "page.md").exists()


#: The copy moves 4000 GB/s: 1 GB in half a millisecond is half of it.
ROWS: dict[str, Any] = {
    "probe/portable": {"status": "ok", "answer": "validity: a|b"},
    "ceilings/copy": {"status": "ok", "gb_per_s": 4000.0},
    "checks/small": {"status": "ok", "error_of_budget": 0.25, "seconds": 3.0},
    "times/1024x1": {
        "status": "ok",
        "rows": 64,
        "bytes": 10**9,
        "flops": 247_250_000_000,
        "reasons": {"flashinfer": "not installed"},
        "times": {
            "ours": {"ms": 0.5, "graph": True},
            "gather": {"ms": 0.1, "graph": True},
            "sdpa": {"ms": 1.0, "graph": True},
            "flex": {"ms": 0.25, "graph": False},
        },
    },
}


def test_kernels_are_compared_with_the_copy_and_with_the_best_peer() -> None:
    """A peer that was no graph is none: its time holds what the host needs."""
    text = cases({"device": "NVIDIA H200"}, ROWS)
    assert "| times/1024x1 | ours 0.5 ms, 50% of the copy rate, 50% of the tensor cores' peak, 2.00 × (sdpa) |" in text
    assert "| probe/portable | validity: a\\|b |" in text
    assert "| checks/small | error_of_budget 0.25 |" in text
    assert text.endswith("- flashinfer: not installed\n- flex: not captured as a CUDA graph")
