"""Selection, order and pooling of cells for tables and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from d2sd.bench.result import Cell, Difference, Response, Result
from d2sd.policies import DrafterName, parse_method
from d2sd.runtime.stats import Bin
from d2sd.viz import plot_style as style
from d2sd.viz.plot_style import Line

#: The order of lines. A method that is not listed comes last.
METHODS = tuple(style.METHODS)
PLAIN = "off"
ADAPTIVE = "auto"
#: Figures of a cell that add up over sets.
SUMMED = ("verified_rows", "traced_steps", "nodes", "merged", "rescued", "steps", "wall_seconds")


def temperatures(result: Result) -> list[float]:
    return sorted({cell.temperature for cell in result.cells})


def concurrencies(result: Result, temperature: float) -> list[int]:
    return sorted({cell.concurrency for cell in result.cells if cell.temperature == temperature})


def sets(result: Result) -> list[str]:
    """Names of the prompt sets, in the order measured."""
    return list(dict.fromkeys(cell.set for cell in result.cells))


def place(line: Line) -> tuple[int, str, int]:
    """Sort key of lines."""
    policy, _ = parse_method(line.method)
    return (METHODS.index(policy) if policy in METHODS else len(METHODS), *line)


def lines(result: Result, temperature: float, concurrency: int) -> list[Line]:
    at = (temperature, concurrency)
    measured = {Line(c.method, c.rows) for c in result.cells if (c.temperature, c.concurrency) == at}
    return sorted(measured, key=place)


def widest(result: Result, temperature: float, concurrency: int) -> list[Line]:
    """Every method once, at its largest row budget."""
    return list({line.method: line for line in lines(result, temperature, concurrency)}.values())


def cells_of(result: Result, line: Line, temperature: float, concurrency: int) -> dict[str, Cell]:
    """The cells of a line by set, in the order of `sets`."""
    by_key = {cell.key: cell for cell in result.cells}
    keys = {name: (*line, name, temperature, concurrency) for name in sets(result)}
    return {name: by_key[key] for name, key in keys.items() if key in by_key}


def pooled(result: Result, line: Line, temperature: float, concurrency: int) -> tuple[Cell, Cell | None]:
    """All sets of a line as one cell, and plain decoding on the same sets, None if it was not measured."""
    ours = cells_of(result, line, temperature, concurrency)
    plain = cells_of(result, Line(PLAIN, 1), temperature, concurrency)
    both = ours.keys() <= plain.keys()
    return pool(list(ours.values())), pool([plain[name] for name in ours]) if both else None


def compared(result: Result) -> list[Cell]:
    """The cells whose responses were compared with plain decoding: all but that itself at the lowest concurrency."""
    lowest = {temperature: concurrencies(result, temperature)[0] for temperature in temperatures(result)}
    return [c for c in result.cells if (c.method, c.concurrency) != (PLAIN, lowest[c.temperature])]


def runs(cells: Sequence[Cell]) -> str:
    """Say in words which figures are of which run."""
    if any(cell.traced_steps for cell in cells):
        return (
            "all figures are of engines as served, whose steps run ahead, but nodes, merged, rescued, ECE and boundary "
            "ranks: these are of a second, traced run of the same requests, whose answers were compared"
        )
    return "times and counts are of one run: steps that do not run ahead are served alike with a trace and without"


def pool(cells: Sequence[Cell]) -> Cell:
    """Merge cells that differ only in their sets: all requests, and sums of all counts."""
    head, requests, differences = cells[0], list[Response](), list[Difference]()
    counts = {name: Counter[str]() for name in ("policies", "boundary_rank", "stage_seconds")}
    bins: dict[DrafterName, list[Bin]] = {}
    for cell in cells:
        assert cell.key._replace(set=head.set) == head.key
        differences += [d.model_copy(update={"request": d.request + len(requests)}) for d in cell.differences]
        requests += [r.model_copy(update={"id": f"{cell.set}/{r.id}"}) for r in cell.requests]
        for name, summed in counts.items():
            summed.update(getattr(cell, name))
        for drafter, new in cell.calibration.items():
            old = bins.get(drafter, [(0, 0.0, 0)] * len(new))
            bins[drafter] = [(a + x, b + y, c + z) for (a, b, c), (x, y, z) in zip(old, new, strict=True)]
    sums = {name: sum(getattr(cell, name) for cell in cells) for name in SUMMED}
    merged = {"set": "all", "requests": requests, "differences": differences, "calibration": bins, **sums}
    return head.model_copy(update=merged | {name: dict(summed) for name, summed in counts.items()})
