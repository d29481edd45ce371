"""Markdown tables by column, numbers rounded, the best one bold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

NONE = "–"
Column = tuple[str, Sequence[str]]


def table(columns: Sequence[Column]) -> str:
    """Columns of equal length under their headings; the first is text, the others are right-aligned."""
    lines = [[heading for heading, _ in columns], ["---", *["---:"] * (len(columns) - 1)]]
    lines += [list(line) for line in zip(*(cells for _, cells in columns), strict=True)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


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
