"""A short table of the suite's results: one line per group of cases, with its worst and best figure.

Times are in the JSON. Here they are shares of the copy rate of the same run, and ratios to peers of the same run:
above 1 our kernel takes less time than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.record import Row
from benchmarks.gpu.roofline import PEAKS, GpuPeaks
from benchmarks.gpu.shapes import COMPUTED, GATE
from d2sd.bench.markdown import line_table
from d2sd.bench.measured import is_kind

Rows = dict[str, Row]
#: A figure and its case.
Figure = tuple[float, str]
#: They compute something else, or only a part, so they are not counted as peers.
NO_PEERS = ("ours", "gather", "flash, no mask")
NO_GRAPH = "not captured as a CUDA graph"


def render(environment: dict[str, Any], rows: Rows) -> str:
    """Markdown: the table, then every case without a figure, with its reason."""
    rows = {key: fair(row) for key, row in rows.items()}
    about = ", ".join(f"{name} {environment.get(name) or 'none'}" for name in ("device", "torch", "triton", "commit"))
    if environment.get("triton brought"):
        about += f" (Triton from a pack in front of {environment['triton installed'] or 'none'})"
    lines = [about, "", line_table(["what", "cases", "worst", "best"], _lines(environment, rows))]
    missing = [
        f"- {key}: {row['status']}, {row.get('reason', '')}" for key, row in rows.items() if row["status"] != "ok"
    ]
    lines += ["", *missing] if missing else []
    peers = sorted({f"{name}: {why}" for row in rows.values() for name, why in row.get("reasons", {}).items()})
    lines += ["", "Peers without a time:", *(f"- {line}" for line in peers)] if peers else []
    return "\n".join(lines)


def peaks_of(environment: dict[str, Any]) -> GpuPeaks | None:
    """Peaks of the data sheet, by the device's name."""
    device = environment.get("device") or ""
    return next((peaks for name, peaks in PEAKS.items() if is_kind(device, name)), None)


def _lines(environment: dict[str, Any], rows: Rows) -> Iterator[tuple[str, ...]]:
    for key, row in _part(rows, "probe").items():
        if "answer" in row:
            yield f"TensorRT-RTX, engine {key.removeprefix('probe/')}", "1", row["answer"][:160], ""
    rate = rows.get("ceilings/copy", {}).get("gb_per_s")
    if rate:
        yield "copy, bytes read and written", "1", f"{rate:.0f} GB/s", ""
    for key, row in _part(rows, "ceilings").items():
        what, unit = ("gb_per_s", "GB/s") if "gb_per_s" in row else ("tflops", "TFLOP/s")
        if what in row and key != "ceilings/copy":
            yield _short(key), "1", f"{row[what]:.0f} {unit}", row.get("card", "")
    for key, row in _part(rows, "budgets").items():
        if "graph_ms" in row:
            yield f"step {_short(key)}", "1", f"{row['graph_ms']:.2f} ms captured", ""
    for method, row in rows.get("endtoend/bf16", {}).get("methods", {}).items():
        flights = [one for one in row["rounds"][-1:] for one in one if "tokens_per_s" in one]
        speeds = ", ".join(f"{one['in_flight']}: {one['tokens_per_s']:.0f}" for one in flights)
        yield f"tokens/s of {method}, by requests in flight", str(len(flights)), speeds, ""
    for part, what in (
        ("checks", "attention: error, of its bound"),
        ("replay", "one CUDA graph, other lengths: error"),
    ):
        found = {key: row for key, row in _part(rows, part).items() if row["status"] == "ok"}
        errors = [(max(row["error_of_budget"], row["relative_error_of_budget"]), key) for key, row in found.items()]
        yield from _line(what, errors, _plain, most_is_best=False)
    equal = [(row["equal_to_eager"], key) for key, row in _part(rows, "captured").items() if "equal_to_eager" in row]
    yield from _line("served by CUDA graphs: answers equal to eager steps", equal, _percent)
    of_steps = _part(rows, "first_steps") | _part(rows, "steps") | _part(rows, "exact")
    for key, row in of_steps.items():
        if "graph_ms" in row:
            yield (
                f"decode step {_short(key)}{', PyTorch’s products' if key.startswith('first') else ''}",
                "1",
                f"{row['eager_ms']:.2f} ms eager",
                f"{row['graph_ms']:.2f} ms captured",
            )
    if rate:
        for kind in ("bf16", "fp8"):
            yield from _products(kind, _part(rows, "products"), rate)
        yield from _gate(rows, rate)
        yield from _attention(_part(rows, "times"), rate, peaks_of(environment))
        shares = [(_share(row, rate), key) for key, row in _part(rows, "writes").items() if "times" in row]
        yield from _line("paged write: share of copy rate", shares, _percent)
    yield from _flex(_part(rows, "flex"))
    for key, row in (_part(rows, "pytest") | _part(rows, "training")).items():
        if "passed" in row:
            counts = ", ".join(f"{row[name]} {name}" for name in ("passed", "failed", "error", "skipped"))
            yield key.replace("/", " ", 1), str(row["passed"] + row["failed"] + row["error"]), counts, ""


def _gate(rows: Rows, rate: float) -> Iterator[tuple[str, ...]]:
    """One line: the share, then the ratio to every peer, the best one first; FlexAttention has its own case."""
    found = [rows.get(f"{part}/{GATE.name}", {}) for part in ("times", "flex")]
    if "ours" not in found[0].get("times", {}):
        return
    peers = [(row, name) for row in found for name in row.get("times", {}) if name not in NO_PEERS]
    ratios = sorted((_against(row, name), name) for row, name in peers)
    against = ", ".join(f"{_times(ratio)} ({name})" for ratio, name in ratios) or "no peer"
    said = f"{_percent(_share(found[0], rate))}; {against}"
    yield f"gate, {GATE.name}: share of copy rate; against peers", "1", said, ""


def _attention(rows: Rows, rate: float, peaks: GpuPeaks | None) -> Iterator[tuple[str, ...]]:
    """Up to four lines for each kind of heads and pages and each number of rows."""
    groups: dict[tuple[str, int], Rows] = {}
    for key, row in rows.items():
        if "ours" in row.get("times", {}):
            groups.setdefault((row["group"], row["rows"]), {})[key] = row
    for (group, count), found in sorted(groups.items()):
        title = f"attention {group}, {count} rows"
        yield from _line(f"{title}: share of copy rate", [(_share(r, rate), k) for k, r in found.items()], _percent)
        computed = [
            (row["flops"] / (row["times"]["ours"]["ms"] * 1e-3), key) for key, row in found.items() if "flops" in row
        ]
        if peaks and count >= COMPUTED:
            shares = [(flops / peaks.half, key) for flops, key in computed]
            yield from _line(f"{title}: share of the tensor cores' peak", shares, _percent)
        best = [(_against(row, name := fastest(row)), f"{key}, {name}") for key, row in found.items() if fastest(row)]
        yield from _line(f"{title}: against the best peer", best, _times)
        flash = [(_against(row, NO_PEERS[2]), key) for key, row in found.items() if NO_PEERS[2] in row["times"]]
        yield from _line(f"{title}: against FlashAttention without a mask", flash, _times)


def _products(kind: str, rows: Rows, rate: float) -> Iterator[tuple[str, ...]]:
    found = {key: row["times"] for key, row in rows.items() if f"/{kind} " in key and "plain" in row.get("times", {})}
    shares = [(_form(rows[key], "plain", rate), key) for key in found]
    yield from _line(f"products {kind}: share of copy rate", shares, _percent)
    best = {key: min(times, key=lambda name: times[name]["ms"]) for key, times in found.items()}
    gains = [(times["plain"]["ms"] / times[best[key]]["ms"], f"{key}, {best[key]}") for key, times in found.items()]
    yield from _line(f"products {kind}: best form against the plain one", gains, _times)


def _flex(rows: Rows) -> Iterator[tuple[str, ...]]:
    found = {key: row["times"] for key, row in rows.items() if "flex" in row.get("times", {})}
    alone = [(times["flex"]["ms"] / times["ours"]["ms"], key) for key, times in found.items()]
    both = [
        ((times["flex"]["ms"] + times["gather"]["ms"]) / times["ours"]["ms"], key)
        for key, times in found.items()
        if "gather" in times
    ]
    yield from _line("attention: against FlexAttention, gather not counted", alone, _times)
    yield from _line("attention: against FlexAttention and its gather", both, _times)


def fair(row: Row) -> Row:
    """If ours ran as a CUDA graph, a peer that did not gets a reason instead of its time, which includes the host's."""
    times = row.get("times", {})
    if not times.get("ours", {}).get("graph"):
        return row
    called = {name: NO_GRAPH for name, found in times.items() if not found["graph"]}
    graphs = {name: found for name, found in times.items() if name not in called}
    return row | {"times": graphs, "reasons": row.get("reasons", {}) | called}


def fastest(row: Row) -> str:
    """The fastest masked peer of a row; "" if there is none."""
    peers = {name: found["ms"] for name, found in row["times"].items() if name not in NO_PEERS}
    return min(peers, key=lambda name: peers[name], default="")


def _against(row: Row, name: str) -> float:
    ratio: float = row["times"][name]["ms"] / row["times"]["ours"]["ms"]
    return ratio


def _share(row: Row, rate: float) -> float:
    return _form(row, "ours", rate)


def _form(row: Row, name: str, rate: float) -> float:
    """Required bytes over the time of `name`, as a fraction of the copy rate (GB/s)."""
    share: float = row["bytes"] / (row["times"][name]["ms"] * 1e6) / rate
    return share


def _line(
    what: str, figures: list[Figure], say: Callable[[float], str], most_is_best: bool = True
) -> Iterator[tuple[str, ...]]:
    if not figures:
        return
    ordered = sorted(figures, reverse=not most_is_best)
    (worst, worst_key), (best, best_key) = ordered[0], ordered[-1]
    cells = (f"{say(worst)} ({_short(worst_key)})", f"{say(best)} ({_short(best_key)})")
    yield what, str(len(figures)), *cells


def _short(key: str) -> str:
    """A key without the name of its part."""
    return key.split("/", 1)[1]


def _part(rows: Rows, part: str) -> Rows:
    return {key: row for key, row in rows.items() if key.startswith(f"{part}/")}


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} ×"


def _plain(error: float) -> str:
    return f"{error:.2f}"
