"""Output of commands for people: labelled lines and tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from d2sd.io import printable
from d2sd.recipe import Recipe

#: soft_wrap: paths are never cut, neither in a narrow terminal nor in a pipe.
CONSOLE = Console(soft_wrap=True)


def line(label: str, text: object) -> None:
    """Print a line of what a command knows."""
    CONSOLE.print(printable(f"{label:15}{text}"), markup=False, highlight=False)


def lines(pairs: Iterable[tuple[str, str]]) -> None:
    """Print several."""
    for label, text in pairs:
        line(label, text)


def show_table(table: Table, console: Console = CONSOLE) -> None:
    """Print a table at the width that its contents need: a narrow terminal wraps the lines, but no name is cut."""
    width = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(file=console.file, width=max(width, console.width)).print(table)


def show_settings(recipe: Recipe) -> None:
    """Print precision, tree and limits of a recipe."""
    tree, limits = recipe.tree, recipe.limits
    for lora in recipe.target.lora:
        line("merged", f"LoRA {lora.path} x {lora.scale:g}")
    fp8 = recipe.fp8.model_dump(include={"target", "drafters", "kv"}) if recipe.fp8 else {}
    parts = [recipe.precision, *(f"{part} in FP8" for part, enabled in fp8.items() if enabled)]
    line("precision", ", ".join(parts + ["batch-invariant (exact)"] * recipe.exact))
    sizes = f"block {tree.block_size}, depth {tree.depth}, branches {tree.branches}, row budget {tree.row_budget}"
    line("tree", f"{tree.policy}, {sizes}")
    line("limits", f"{limits.max_batch} requests of {limits.max_context} tokens, pages of {limits.page_size}")
