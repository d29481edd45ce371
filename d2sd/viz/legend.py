"""The legend of a tree: a row of samples that wraps at the width of the picture."""

from __future__ import annotations

from collections.abc import Sequence

from d2sd.viz.layout import CELL
from d2sd.viz.nodes import Step

_LINE = 26
_SAMPLE = 30


def legend(steps: Sequence[Step], width: float) -> tuple[str, float, float]:
    """The legend entries that `steps` need, as SVG at most `width` wide; its height and width."""
    sources = {node.source for step in steps for node in step.nodes}
    keys = [("anchor", 5, "last token so far")]
    if "first" in sources:
        keys.append(("first", 5, "first draft"))
    if "second" in sources:
        keys.append(("second", 10, "second pass"))
    if "first" in sources:
        keys.append(("yes", 5, "accepted by the target"))
    if any(step.miss is not None for step in steps):
        keys.append(("miss", 5, "first wrong token of the first draft"))
    if any(step.saved and not step.by_second for step in steps):
        keys.append(("rescue", 10, "another guess saved the step here"))
    if any(step.saved and step.by_second for step in steps):
        keys.append(("rescue by-second", 10, "the second pass saved the step here"))
    keys.append(("bonus", 5, "bonus: the target's own"))
    if "first" in sources:
        keys.append(("%", 0, "drafter's probability"))
    parts, x, y, widest = [], 0.0, 0, 0.0
    for kind, radius, text in keys:
        room = _SAMPLE + 7 + len(text) * CELL * 0.92 + 18
        if x and x + room > width:
            x, y = 0.0, y + _LINE
        sample = f'<rect class="box" x="{x:g}" y="{y + 1}" width="{_SAMPLE}" height="18" rx="{radius}"/>'
        if kind == "%":
            sample = f'<text class="p" x="{x + _SAMPLE - 2:g}" y="{y + 14}">62%</text>'
        label = f'<text class="key" x="{x + _SAMPLE + 7:g}" y="{y + 14}">{text}</text>'
        parts.append(f'<g class="{kind}">{sample}</g>{label}')
        x += room
        widest = max(widest, x)
    return "\n".join(parts), y + _LINE + 8.0, widest
