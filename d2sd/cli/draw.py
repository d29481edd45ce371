"""A draft tree in the terminal: one line a node, the accepted path marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.tree import Tree as Drawing

    from d2sd.runtime.engine import StepTrace


def draw_tree(trace: StepTrace, row: int, show: Callable[[int], str]) -> Drawing:
    """The tree of one request of a step; `show` turns a token id into text.

    Green: accepted. Dim: drafted and rejected. The bonus token, the target's own choice at the end of the accepted
    path, is appended behind it.
    """
    from rich.markup import escape
    from rich.tree import Tree as Drawing

    tree, accepted = trace.tree, trace.accepted
    count = int(accepted.count[row])
    path = set(accepted.path[row, :count].tolist())
    tokens, parents = tree.tokens[row].tolist(), tree.parent[row].tolist()
    origins, valid = tree.origin[row].tolist(), tree.valid[row].tolist()

    def label(node: int) -> str:
        source = "anchor" if node == 0 else "first draft" if origins[node] == 0 else f"branch {origins[node]}"
        text = escape(repr(show(tokens[node])))
        return f"[bold green]{text}[/] [green]✓ {source}[/]" if node in path else f"[dim]{text}  {source}[/]"

    drawings = {0: Drawing(label(0), guide_style="dim")}
    for node in range(1, len(tokens)):
        if valid[node]:
            drawings[node] = drawings[parents[node]].add(label(node))
    bonus = escape(repr(show(int(accepted.tokens[row, count - 1]))))
    drawings[int(accepted.path[row, count - 1])].add(f"[bold yellow]{bonus}[/] [yellow]bonus[/]")
    return drawings[0]
