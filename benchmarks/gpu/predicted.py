"""Figures that the first hour is expected to show, written before it, and the table that a run fills in beside it.

A line here is a line there: edit `PREDICTIONS`. Steps have besides what docs/roofline.md computes for them, which their
rows in `gpu.json` hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.record import Row
from benchmarks.gpu.roofline import PEAKS, GpuPeaks
from d2sd.bench.markdown import NONE, line_table
from d2sd.bench.measured import is_kind

COPY = "ceilings/copy"


@dataclass(frozen=True)
class Prediction:
    """A figure of one case, between `low` and `high` on `gpu`.

    `figure` is its path in the row of gpu.json, or "share": the case's bytes over the time at `figure`'s default, as a
    fraction of the copy rate. With `over` it is divided by that case's.
    """

    case: str
    low: float
    high: float
    source: str
    figure: str = "graph_ms"
    over: str | None = None
    gpu: str = "H100"

    @property
    def name(self) -> str:
        return f"{self.case}, {self.figure}" + (f" / {self.over}" if self.over else "")


_REVIEW = "review of the GPU path, after its repairs"
_BEFORE = "review of the GPU path, kernel before its repair"
_BOUND = "bound by counted instructions and bytes"
_COUNTED = "docs/kernel-times.md, 7.7 µs"
_NODES = "docs/kernel-times.md: nodes, copies, and products of two kernels"
_OURS = "times.ours.ms"

PREDICTIONS: tuple[Prediction, ...] = (
    Prediction(COPY, 2900, 3050, "PyTorch's copy on other cards of this kind, read and write", "gb_per_s"),
    Prediction("ceilings/read", 3000, 3100, "90 to 93 % of the data sheet", "gb_per_s"),
    Prediction("ceilings/read", 4300, 4500, "90 to 93 % of the data sheet", "gb_per_s", gpu="H200"),
    Prediction(COPY, 4200, 4350, "PyTorch's copy on other cards of this kind, read and write", "gb_per_s", gpu="H200"),
    Prediction("steps/bf16 off x1", 6.0, 6.4, _REVIEW),
    Prediction("steps/bf16 d2sd x1", 8.8, 9.7, _REVIEW),
    Prediction("steps/fp8 d2sd x1 V=32768", 5.0, 5.6, _REVIEW),
    Prediction("steps/bf16 d2sd x1", 1.5, 1.6, _REVIEW, over="steps/bf16 off x1"),
    Prediction("steps/fp8 d2sd x1 V=32768", 1.35, 1.5, _REVIEW, over="steps/fp8 off x1"),
    Prediction("steps/bf16 d2sd x1", 438, 450, _NODES, "kernels"),
    Prediction("steps/fp8 d2sd x1 V=32768", 440, 452, _NODES, "kernels"),
    Prediction("exact/bf16 d2sd x1 exact", 12.2, 13.7, "the review's products and attention of exact mode"),
    Prediction("times/2048x1 r64 32/8x128 bf16", 0.007, 0.012, _COUNTED, _OURS),
    Prediction("times/32768x8 r64 32/8x128 bf16", 0.30, 0.45, _BEFORE, "share"),
    Prediction("times/32768x1 r1 32/8x128 bf16", 0.60, 0.75, _BEFORE, "share"),
    Prediction("times/32768x1 r64 32/8x128 bf16/fp8", 0.15, 0.25, _BEFORE, "share"),
    Prediction("products/bf16 gate_up r64", 0.70, 0.78, "cuBLAS on H100, published", "share"),
    Prediction("products/fp8 gate_up r64", 0.55, 0.68, "CUTLASS on H100, published (its issue 1139)", "share"),
    Prediction("choices/choose top-p V=151936 x1", 0.010, 0.030, _BOUND, _OURS),
    Prediction("choices/choose top-p V=151936 x32", 0.1, 0.3, _BOUND, _OURS),
    Prediction("choices/grow 64 x1", 0.005, 0.015, _BOUND, _OURS),
)
#: Milliseconds of steps with 1, 4, 8, 16 and 32 requests by the review's model of nodes, on an H200.
_MODEL = "the review's model of nodes"
_BATCHES = (1, 4, 8, 16, 32)
_H200 = {
    "bf16 off x{}": (4.85, 5.07, 5.45, 6.21, 7.74),
    "bf16 chain x{} 16 nodes": (6.13, 6.24, 7.04, 10.6, 19.6),
    "bf16 ddtree x{}": (6.20, 9.12, 15.9, 29.8, 58.0),
    "bf16 hybrid x{} 16 nodes": (7.21, 7.89, 10.1, 16.4, 30.7),
    "bf16 hybrid x{} 16 nodes 1 branches": (7.18, 7.35, 8.28, 12.4, 23.1),
    "bf16 hybrid x{}": (7.28, 10.7, 18.9, 35.6, 69.1),
    "mixed hybrid x{} V=32768": (6.35, 9.53, 16.9, 31.9, 62.0),
    "fp8 off x{} V=32768": (3.49, 3.70, 4.08, 4.85, 6.37),
    "fp8 chain x{} 16 nodes V=32768": (4.29, 4.40, 5.14, 7.68, 13.8),
    "fp8 hybrid x{} V=32768": (4.97, 7.38, 12.6, 23.5, 45.3),
}
#: The same in steps of plain decoding, on an H100.
_H100 = {
    "bf16 hybrid x{}": (1.48, 1.63, 2.60, 4.21, 6.50),
    "bf16 hybrid x{} 16 nodes": (1.47, 1.47, 1.65, 2.02, 3.01),
    "bf16 hybrid x{} 16 nodes 1 branches": (1.47, 1.44, 1.46, 1.57, 2.32),
}
PREDICTIONS += tuple(
    Prediction(f"budgets/{name.format(batch)}", value, value, _MODEL, gpu="H200")
    for name, values in _H200.items()
    for batch, value in zip(_BATCHES, values, strict=True)
)
PREDICTIONS += tuple(
    Prediction(f"budgets/{name.format(batch)}", value, value, _MODEL, over=f"budgets/bf16 off x{batch}")
    for name, values in _H100.items()
    for batch, value in zip(_BATCHES, values, strict=True)
)
#: What "share" divides by, of each case's times; the first that it has.
SHARED = ("ours", "plain")


def peaks_of(environment: dict[str, Any]) -> GpuPeaks | None:
    """Peaks of the data sheet, by the device's name."""
    return next((peaks for name, peaks in PEAKS.items() if is_kind(environment.get("device") or "", name)), None)


def compare(environment: dict[str, Any], rows: dict[str, Row]) -> str:
    """Markdown: what was predicted for this GPU, what was measured, and the ratio to the middle of the prediction."""
    gpu = next((name for name in PEAKS if is_kind(environment.get("device") or "", name)), None)
    lines = [(one.name, one.low, one.high, _measured(one, rows), one.source) for one in PREDICTIONS if one.gpu == gpu]
    lines += _arithmetic(gpu, rows)
    cells = [
        (name, _range(low, high), NONE if found is None else f"{found:.3g}", _ratio(found, (low + high) / 2), source)
        for name, low, high, found, source in lines
    ]
    if not cells:
        return "Nothing was predicted for this device."
    return line_table(["figure", "predicted", "measured", "ratio", "source"], cells)


def _arithmetic(gpu: str | None, rows: dict[str, Row]) -> Iterator[tuple[str, float, float, float | None, str]]:
    for key, row in rows.items():
        if gpu and gpu in row.get("by_arithmetic_ms", {}) and "graph_ms" in row:
            floor, _, nodes = row["by_arithmetic_ms"][gpu]
            yield f"{key}, graph_ms", nodes, nodes, row["graph_ms"], f"arithmetic with nodes; floor {floor:.3g}"


def _measured(one: Prediction, rows: dict[str, Row]) -> float | None:
    found = _figure(_row(one.case, rows), one.figure, rows)
    if found is None or one.over is None:
        return found
    other = _figure(_row(one.over, rows), one.figure, rows)
    return found / other if other else None


def _row(case: str, rows: dict[str, Row]) -> Row:
    """The case's, or until a step is measured with chosen products that of the first call."""
    first = rows.get(f"first_{case}", {})
    row = rows.get(case, first)
    return first if "graph_ms" in first and "graph_ms" not in row else row


def _figure(row: Row, figure: str, rows: dict[str, Row]) -> float | None:
    if figure == "share":
        rate, times = rows.get(COPY, {}).get("gb_per_s"), row.get("times", {})
        name = next((name for name in SHARED if name in times), None)
        return row["bytes"] / (times[name]["ms"] * 1e6) / rate if rate and name else None
    found: Any = row
    for part in figure.split("."):
        found = found.get(part, {})
    return None if found == {} else float(found)


def _range(low: float, high: float) -> str:
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _ratio(found: float | None, middle: float) -> str:
    return NONE if found is None else f"{found / middle:.2f}"
