"""A draft tree in the terminal: one line per node, the accepted path marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.tree import Tree as Drawing

    from d2sd.viz.nodes import Node, Step


def draw_tree(step: Step) -> Drawing:
    """The tree of one request of a step.

    Green: accepted. Dim: drafted and rejected. The bonus token, the target's own choice at the end of the accepted
    path, is its last node.
    """
    from rich.tree import Tree as Drawing

    drawings = [Drawing(_label(step.nodes[0]), guide_style="dim")]
    for node in step.nodes[1:]:
        drawings.append(drawings[node.parent].add(_label(node)))
    return drawings[0]


def _label(node: Node) -> str:
    from rich.markup import escape

    text = escape(repr(node.text))
    if node.source == "bonus":
        return f"[bold yellow]{text}[/] [yellow]bonus[/]"
    source = "anchor" if node.source == "anchor" else f"branch {node.branch}" if node.branch else "first draft"
    return f"[bold green]{text}[/] [green]✓ {source}[/]" if node.accepted else f"[dim]{text}  {source}[/]"
