"""The suite's table, from a recorded result whose figures are easy to follow."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import timing
from benchmarks.gpu.shapes import GATE, timed
from benchmarks.gpu.table import render


def times(**ms: float) -> dict[str, Any]:
    return {name.replace("_", " "): {"ms": value, "graph": True} for name, value in ms.items()}


#: The copy moves 4000 GB/s: 1 GB in half a millisecond is half of it.
ROWS: dict[str, Any] = {
    "probe/portable": {"status": "ok", "answer": "validity: a|b"},
    "ceilings/copy": {"status": "ok", "gb_per_s": 4000.0},
    "checks/small": {"status": "ok", "error_of_budget": 0.25, "relative_error_of_budget": 0.5},
    "checks/middle": {"status": "ok", "error_of_budget": 0.75, "relative_error_of_budget": 0.5},
    "checks/wrong": {"status": "failed", "reason": "Wrong: past the bounds"},
    "times/1024x1": {
        "status": "ok",
        "group": "32/8x128 bf16",
        "rows": 64,
        "bytes": 10**9,
        "reasons": {"flashinfer": "not installed"},
        "times": times(ours=0.5, gather=0.1, sdpa_math=3.0, sdpa_efficient=1.0, **{"flash, no mask": 0.4}),
    },
    "times/8192x1": {
        "status": "died",
        "reason": "-11",
        "group": "32/8x128 bf16",
        "rows": 64,
        "bytes": 10**9,
        "times": times(ours=0.3125, sdpa_efficient=0.25),
    },
    "times/1024x1 fp8": {
        "status": "ok",
        "group": "32/8x128 bf16/fp8",
        "rows": 64,
        "bytes": 10**9,
        "times": times(ours=1.0),
    },
    "times/32768x1": {"status": "no time", "reason": "the time of this part was up"},
    "writes/commit": {"status": "ok", "bytes": 10**9, "times": times(ours=2.5)},
    "flex/8192x8": {"status": "ok", "times": times(ours=1.0, gather=0.5, flex=0.75)},
    "pytest/tests/a.py": {
        "status": "failed",
        "reason": "exit status 1",
        "passed": 3,
        "failed": 1,
        "error": 0,
        "skipped": 2,
    },
}

EXPECTED = """\
device H200, torch 2.11, triton none, commit none

| what | cases | worst | best |
| --- | --- | --- | --- |
| TensorRT-RTX, engine portable | 1 | validity: a\\|b |  |
| copy, bytes read and written | 1 | 4000 GB/s |  |
| attention: error, of its bound | 2 | 0.75 (middle) | 0.50 (small) |
| attention 32/8x128 bf16, 64 rows: share of copy rate | 2 | 50% (1024x1) | 80% (8192x1) |
| attention 32/8x128 bf16, 64 rows: against the best peer | 2 | 0.80 × (8192x1, sdpa efficient) \
| 2.00 × (1024x1, sdpa efficient) |
| attention 32/8x128 bf16, 64 rows: against FlashAttention without a mask | 1 | 0.80 × (1024x1) | 0.80 × (1024x1) |
| attention 32/8x128 bf16/fp8, 64 rows: share of copy rate | 1 | 25% (1024x1 fp8) | 25% (1024x1 fp8) |
| paged write: share of copy rate | 1 | 10% (commit) | 10% (commit) |
| attention: against FlexAttention, gather not counted | 1 | 0.75 × (8192x8) | 0.75 × (8192x8) |
| attention: against FlexAttention and its gather | 1 | 1.25 × (8192x8) | 1.25 × (8192x8) |
| pytest tests/a.py | 4 | 3 passed, 1 failed, 0 error, 2 skipped |  |

- checks/wrong: failed, Wrong: past the bounds
- times/8192x1: died, -11
- times/32768x1: no time, the time of this part was up
- pytest/tests/a.py: failed, exit status 1

Peers without a time:
- flashinfer: not installed"""


def test_table_of_a_recorded_result() -> None:
    assert render({"device": "H200", "torch": "2.11", "triton": None}, ROWS) == EXPECTED


def gate_rows() -> dict[str, Any]:
    row = {"status": "ok", "group": GATE.group_name, "rows": GATE.rows, "bytes": 10**9}
    return {
        "ceilings/copy": ROWS["ceilings/copy"],
        f"times/{GATE.name}": row | {"times": times(ours=0.3125, gather=0.1, sdpa_efficient=0.375, flashinfer=0.25)},
        f"flex/{GATE.name}": {"status": "ok", "times": times(ours=0.25, flex=0.5)},
    }


def gate_line(rows: dict[str, Any]) -> str:
    return next(line for line in render({}, rows).splitlines() if line.startswith("| gate, "))


def test_the_gate_has_a_line() -> None:
    """Its share of the copy rate, and every peer's ratio, FlexAttention's of its own case too."""
    assert GATE in timed()
    what = "| gate, 32768x8 r64 32/8x128 bf16: share of copy rate; against peers | 1 |"
    assert gate_line(gate_rows()) == f"{what} 80%; 0.80 × (flashinfer), 1.20 × (sdpa efficient), 2.00 × (flex) |  |"
    alone = gate_rows()
    del alone[f"flex/{GATE.name}"]
    alone[f"times/{GATE.name}"]["times"] = times(ours=0.3125)
    assert gate_line(alone) == f"{what} 80%; no peer |  |"


def test_a_peer_that_was_no_graph_is_none() -> None:
    """Its time holds what the host needs; where ours was none either, both do."""
    rows = gate_rows()
    found, flex = rows[f"times/{GATE.name}"]["times"], rows[f"flex/{GATE.name}"]["times"]
    found["flashinfer"]["graph"] = flex["flex"]["graph"] = False
    text = render({}, rows)
    assert "80%; 1.20 × (sdpa efficient) |" in text
    assert "against the best peer | 1 | 1.20 × (32768x8 r64 32/8x128 bf16, sdpa efficient)" in text
    assert "FlexAttention" not in text
    assert text.endswith(
        "Peers without a time:\n- flashinfer: not captured as a CUDA graph\n- flex: not captured as a CUDA graph"
    )
    found["ours"]["graph"] = False
    assert "80%; 0.80 × (flashinfer), 1.20 × (sdpa efficient) |" in render({}, rows)


def test_a_graph_is_one_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([True, False, True])
    monkeypatch.setattr(timing, "once", lambda run: (0.5, next(rounds)))
    measured = timing.Times()
    measured.add("peer", lambda: None)
    measured.again()
    assert measured.figures()["peer"]["graph"] is False


def test_nothing_measured_is_no_line() -> None:
    assert render({}, {}).splitlines()[-1] == "| --- | --- | --- | --- |"
