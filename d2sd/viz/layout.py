"""Layout of a tree: a column for each position, a line for each leaf.

A parent is on the line of its first child, so a path bends only where it branches off a likelier one. Every subtree has
lines of its own and edges run in the gaps between columns, so no boxes overlap and no edges cross.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len

from d2sd.viz.nodes import DRAFTED, Step
from d2sd.viz.text import cut, visible

#: All in CSS pixels; a cell is 0.6 em at 12 px, as in every common fixed-width font, plus some padding.
CELL, BOX, PITCH, GAP, PAD = 7.3, 24, 31, 26, 9
NUMBER = 29  # room for "100%" at 9 px
MOST_CELLS = 16  # of a token; the tooltip has the full text
MARGIN, HEAD = 16, 26  # around the tree; above it, for the column headings


@dataclass(frozen=True, slots=True)
class Box:
    """Left, top and width of a node; all are BOX high."""

    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        return self.y + BOX / 2


@dataclass(frozen=True, slots=True)
class Layout:
    boxes: tuple[Box, ...]  # of the step's nodes, in the same order
    columns: tuple[Box, ...]  # the band of each depth: left, top, width
    width: float
    height: float


def arrange(step: Step) -> Layout:
    """Compute the layout of all nodes of a step."""
    lines = _lines(step)
    columns: list[Box] = []
    left = float(MARGIN)
    for depth in range(1 + max(node.depth for node in step.nodes)):
        here = [node for node in step.nodes if node.depth == depth]
        width = max(cell_len(cut(visible(node.text), MOST_CELLS)) for node in here) * CELL + 2 * PAD
        if any(node.source in DRAFTED for node in here):
            width += NUMBER
        width = max(width, 44)
        columns.append(Box(round(left, 1), 0, round(width, 1)))
        left += width + GAP
    boxes = tuple(
        Box(columns[node.depth].x, HEAD + MARGIN / 2 + line * PITCH, columns[node.depth].width)
        for node, line in zip(step.nodes, lines, strict=True)
    )
    height = HEAD + MARGIN / 2 + max(lines) * PITCH + BOX + MARGIN
    return Layout(boxes, tuple(columns), round(left - GAP + MARGIN, 1), height)


def _lines(step: Step) -> list[int]:
    """Line of each node.

    The bonus token continues the accepted path's line. Next comes the first draft, so that its top-1 chain is the top
    line up to its first rejection, then the other children by probability.
    """
    children: list[list[int]] = [[] for _ in step.nodes]
    for i, node in enumerate(step.nodes[1:], 1):
        children[node.parent].append(i)
    lines = [0] * len(step.nodes)
    free = 0

    def rank(number: int) -> tuple[bool, bool, float, int]:
        node = step.nodes[number]
        return node.source != "bonus", not node.chain, -node.probability, number

    def place(number: int) -> None:
        nonlocal free
        lines[number] = free
        for position, child in enumerate(sorted(children[number], key=rank)):
            free += position > 0
            place(child)

    place(0)
    return lines
