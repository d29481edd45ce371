"""Writes a dated page of results from the JSON files that the suite left.

    python -m benchmarks.gpu.page build/gpu/*.json --out docs/results/gpu-2026-11-26-h200.md

It has the tokens a second of the real pair by requests in flight, where the host's time went, the milliseconds of
captured steps beside what was predicted, and the card's own rates. What they mean is for a reader to add at the top.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.predicted import PREDICTED
from benchmarks.gpu.record import Row
from benchmarks.gpu.roofline import PEAKS
from benchmarks.gpu.shapes import COMPUTED
from d2sd.bench.markdown import NONE, line_table
from d2sd.bench.measured import is_kind

PLAIN = "off"
PAIRS = {"endtoend": "The real pair", "flexdraft": "FlexDraft"}
#: Of a widened pair.
_DRAFTERS = {"bf16": "bf16", "mixed": "FP8", "mixed-16": "FP8 in blocks of 16"}
#: What shares are of: the first that a case has.
OURS = ("ours", "plain")
#: They compute something else, or only a part, so they are not counted as peers.
NO_PEERS = ("gather", "flash, no mask", "least")
NO_GRAPH = "not captured as a CUDA graph"
#: Stages of the host, in the order of a step; the rest of a step's time is the choice, packing and reading.
STAGES = ("prefill", "decode", "retire")


def render(environment: dict[str, Any], rows: dict[str, Row]) -> str:
    """The page, without its conclusions."""
    told = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "python") if environment.get(name))
    lines = [
        f"# {environment['device']}, {environment['began'].split()[0]}",
        "",
        f"{told}; commit {environment['commit']}.",
    ]
    for part, pair_of in PAIRS.items():
        if methods := rows.get(f"{part}/bf16", {}).get("methods"):
            lines += ["", f"## {pair_of} in bf16: tokens a second, and times plain decoding's", "", pair(methods)]
            lines += [
                "",
                "Milliseconds of the host a step: " + ", ".join(STAGES) + ", and all else.",
                "",
                host(methods),
            ]
    for key, row in rows.items():
        if key.startswith("wide_") and row.get("methods"):
            size = key.partition("/")[0].removeprefix("wide_").upper()
            lines += ["", f"## The pair widened to {size}", "", wide(row["methods"])]
    if steps := {key: row for key, row in rows.items() if key.startswith("budgets/") and "graph_ms" in row}:
        lines += ["", "## Captured steps: milliseconds by requests in flight, in brackets what was predicted"]
        lines += ["", budgets(steps, environment["device"])]
    return "\n".join([*lines, "", "## The card", "", *_card(rows), ""])


def flights(methods: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """The last round of each policy, by requests in flight."""
    rounds = {name: row["rounds"][-1] for name, row in methods.items() if row.get("rounds")}
    return {name: {one["in_flight"]: one for one in last if "tokens_per_s" in one} for name, last in rounds.items()}


def pair(methods: dict[str, Any]) -> str:
    """Tokens a second of each policy; tau is that of the first batch size."""
    found = flights(methods)
    sizes, plain = _sizes(found), found.get(PLAIN, {})

    def cells(name: str) -> Iterator[str]:
        for size in sizes:
            speed, base = (row.get(size, {}).get("tokens_per_s") for row in (found[name], plain))
            times = f" ({speed / base:.2f})" if speed and base and name != PLAIN else ""
            yield NONE if speed is None else f"{speed:,.0f}{times}"

    lines = [(_policy(name), f"{found[name][sizes[0]]['tau']:.2f}", *cells(name)) for name in found]
    return line_table(["policy", "tau", *map(str, sizes)], lines)


def wide(methods: dict[str, Any]) -> str:
    """Tokens a second, and times plain decoding's, of each policy; a captured step in milliseconds and plain steps."""
    found = flights(methods)
    sizes, plain = _sizes(found), f"bf16 {PLAIN}"

    def cells(name: str) -> Iterator[str]:
        for size in sizes:
            one, base = (found.get(which, {}).get(size) for which in (name, plain))
            if one is None:
                yield NONE
                continue
            times = f" ({one['tokens_per_s'] / base['tokens_per_s']:.2f})" if base and name != plain else ""
            step, least = (methods.get(which, {}).get("device_ms", {}).get(str(size)) for which in (name, plain))
            told = f"; {step:.2f} ms ({step / least:.2f})" if step and least else ""
            yield f"{one['tokens_per_s']:,.0f}{times}, tau {one['tau']:.2f}{told}"

    lines = []
    for name in found:
        kind, _, method = name.partition(" ")
        lines.append((f"{_policy(method)}, {_DRAFTERS[kind]}", *cells(name)))
    return line_table(["policy, drafters", *map(str, sizes)], lines)


def host(methods: dict[str, Any]) -> str:
    """Where the time of a step went, as the engine's clock has it."""
    found = flights(methods)
    sizes = _sizes(found)

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return NONE
        parts = [row["host"].get(stage, 0.0) for stage in STAGES]
        return ", ".join(f"{1e3 * part / row['steps']:.2f}" for part in (*parts, row["seconds"] - sum(parts)))

    lines = [(_policy(name), *(cell(found[name].get(size)) for size in sizes)) for name in found]
    return line_table(["policy", *map(str, sizes)], lines)


def budgets(steps: dict[str, Row], device: str) -> str:
    """A line for each kind of weights, policy, nodes and branches."""
    predicted = next((found for gpu, found in PREDICTED.items() if is_kind(device, gpu)), {})
    lines: dict[str, dict[int, str]] = defaultdict(dict)
    for key, row in steps.items():
        if key.endswith("profile"):
            continue
        nodes = "" if row["policy"] == PLAIN else f" {row['nodes']}"
        branches = (
            f", {row['branches']} branch{'es' * (row['branches'] > 1)}" if row["policy"] in ("d2sd", "hybrid") else ""
        )
        kind = key.removeprefix("budgets/").split()[0].replace("fp8", "FP8")
        told = f" ({predicted[key]:#.3g})" if key in predicted else ""
        lines[f"{kind} `{row['policy']}`{nodes}{branches}"][row["batch"]] = f"{row['graph_ms']:.2f}{told}"
    sizes = sorted({size for cells in lines.values() for size in cells})
    return line_table(
        ["step", *map(str, sizes)], [(name, *(c.get(n, NONE) for n in sizes)) for name, c in lines.items()]
    )


def cases(environment: dict[str, Any], rows: dict[str, Row]) -> str:
    """A table of what every case has shown; of timed kernels shares of the copy rate, and ratios to the best peer."""
    rate = rows.get("ceilings/copy", {}).get("gb_per_s")
    gpu = next((name for name in PEAKS if is_kind(environment.get("device") or "", name)), None)
    told = ((key, ", ".join(_figures(fair(row), rate, gpu))) for key, row in rows.items())
    lines = [line_table(["case", "figures"], [line for line in told if line[1]])]
    peers = sorted({f"{name}: {why}" for row in rows.values() for name, why in fair(row).get("reasons", {}).items()})
    return "\n".join([*lines, *(["", "Peers without a time:", *(f"- {one}" for one in peers)] if peers else [])])


def _figures(row: Row, rate: float | None, gpu: str | None) -> Iterator[str]:
    """A case's figures in words. Above 1 our kernel takes less time than the peer."""
    times = {name: one["ms"] for name, one in row.get("times", {}).items()}
    ours = next((name for name in (*OURS, *times) if name in times), None)
    if ours is None:
        kept = {name: value for name, value in row.items() if name not in ("status", "reason", "seconds")}
        yield from (f"{name} {value:.4g}" for name, value in kept.items() if isinstance(value, int | float))
        yield from (row[name] for name in ("answer", "card") if name in row)
        if gpu and "by_arithmetic_ms" in row:
            yield "by arithmetic {0:.3g} ms at least, {2:.3g} with nodes".format(*row["by_arithmetic_ms"][gpu])
        return
    yield f"{ours} {times[ours]:.3g} ms"
    if rate and "bytes" in row:
        yield f"{row['bytes'] / (times[ours] * 1e6) / rate:.0%} of the copy rate"
    if gpu and row.get("rows", 0) >= COMPUTED and "flops" in row:
        yield f"{row['flops'] / (times[ours] * 1e-3) / PEAKS[gpu].half:.0%} of the tensor cores' peak"
    peers = {name: ms / times[ours] for name, ms in times.items() if name not in (ours, *NO_PEERS)}
    yield from (f"{ratio:.2f} × ({name})" for name, ratio in sorted(peers.items(), key=lambda pair: pair[1])[:1])


def fair(row: Row) -> Row:
    """If ours ran as a CUDA graph, a peer that did not gets a reason instead of its time, which includes the host's."""
    times = row.get("times", {})
    if not times.get("ours", {}).get("graph"):
        return row
    called = {name: NO_GRAPH for name, found in times.items() if not found["graph"]}
    graphs = {name: found for name, found in times.items() if name not in called}
    return row | {"times": graphs, "reasons": row.get("reasons", {}) | called}


def _card(rows: dict[str, Row]) -> Iterator[str]:
    for key, row in rows.items():
        for figure, unit in (("gb_per_s", "GB/s"), ("tflops", "TFLOP/s")):
            if row["status"] == "ok" and figure in row:
                clocks = row.get("card", "clocks unknown")
                yield f"- {key.removeprefix('ceilings/')}: {row[figure]:,.0f} {unit} ({clocks})"
    for key, row in rows.items():
        if row["status"] != "ok":
            yield f"- {key}: {row['status']}, {row.get('reason', '')}"


def _sizes(found: dict[str, dict[int, Any]]) -> Sequence[int]:
    return sorted({size for row in found.values() for size in row})


def _policy(name: str) -> str:
    """A method's name and nodes; `auto` chooses its own."""
    policy, _, nodes = name.partition(" ")
    return f"`{policy}`" + (f" {nodes}" if nodes and policy != "auto" else "")


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
def main(results: tuple[Path, ...], out: Path) -> None:
    """Write the page OUT from RESULTS, of one card and day; of a case in several files the last one counts."""
    found = [json.loads(path.read_text("utf-8")) for path in results]
    if len(cards := {one["environment"]["device"] for one in found}) > 1:
        raise click.UsageError(f"these results are of several cards: {', '.join(sorted(cards))}")
    rows = {key: row for one in found for key, row in one["rows"].items()}
    out.write_text(render(found[0]["environment"], rows), "utf-8")
    click.echo(out)


if __name__ == "__main__":
    main()
