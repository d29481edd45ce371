"""The writer of Markdown tables: by column or by line, numbers rounded, the best one bold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

NONE = "–"
Column = tuple[str, Sequence[str]]


def table(columns: Sequence[Column]) -> str:
    """Columns of equal length under their headings; the first is text, the others are right-aligned."""
    lines = zip(*(cells for _, cells in columns), strict=True)
    return line_table([heading for heading, _ in columns], lines, aligned="---:")


def line_table(headings: Sequence[str], lines: Iterable[Sequence[str]], aligned: str = "---") -> str:
    """Lines of cells under their headings, without a final newline."""
    rows = [headings, ["---", *[aligned] * (len(headings) - 1)], *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}".replace("%", " %")


def rate(value: float | None) -> str:
    """A speed; without decimals from 100."""
    return NONE if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def largest_bold(values: Sequence[float | None], form: Callable[[float | None], str] = number) -> list[str]:
    """A formatted column; every value that prints like the largest is bold, so equal figures look the same."""
    known = [value for value in values if value is not None]
    best = form(max(known)) if len(known) > 1 else None
    return [f"**{text}**" if text == best else text for text in map(form, values)]
