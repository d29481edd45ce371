"""The tree of a step as SVG text, and its legend: a row of samples that wraps at the width of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.cells import cell_len

from d2sd.viz.layout import BOX, CELL, HEAD, MARGIN, MOST_CELLS, PAD, Box, Layout, arrange
from d2sd.viz.nodes import DRAFTED, Node, Source, Step
from d2sd.viz.text import asset, cut, token_markup, visible

_CAPTION = 34  # height of the caption line of a standalone picture
_BEND = 9  # radius of an edge's corners


def standalone(step: Step, caption: str, least: float = 760) -> str:
    """A complete SVG document, at least `least` wide: caption, tree and legend on a white card."""
    layout = arrange(step)
    width = max(layout.width, cell_len(caption) * 8.5 + 2 * MARGIN, least)
    keys, below = legend([step], width - 2 * MARGIN)
    height = _CAPTION + layout.height + below
    body = [
        f"<style>{asset('tree.css').strip()}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="10"/>',
        f'<text class="caption" x="{MARGIN}" y="{MARGIN + 12}">{escape(caption)}</text>',
        f'<g transform="translate(0 {_CAPTION})">{_tree(step, layout)}</g>',
        f'<g transform="translate({MARGIN} {_CAPTION + layout.height:g})">{keys}</g>',
    ]
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + _svg(step, caption, width, height, "\n".join(body)) + "\n"


def inline(step: Step, caption: str) -> str:
    """An <svg> element for a page that already has tree.css and a legend."""
    layout = arrange(step)
    return _svg(step, caption, layout.width, layout.height, _tree(step, layout))


def key(steps: Sequence[Step]) -> str:
    """The legend of several trees in HTML: samples that wrap at the width of the page."""
    return "".join(
        f'<span><svg class="tree" width="{_SAMPLE + 4}" height="22" viewBox="-2 -1 {_SAMPLE + 4} 22" '
        f'aria-hidden="true">{_sample(kind, radius, 0, 0)}</svg>{text}</span>'
        for kind, radius, text in _entries(steps)
    )


def _svg(step: Step, caption: str, width: float, height: float, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tree" role="img" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">\n<title>{escape(caption)}</title>\n<desc>{escape(_alt(step))}</desc>\n'
        f"{body}\n</svg>"
    )


def _alt(step: Step) -> str:
    """The picture in words, for screen readers."""
    accepted = ", ".join(repr(node.text) for node in step.accepted) or "none"
    drafted = sum(node.source in DRAFTED for node in step.nodes)
    end = "The answer ends with it." if step.bonus is None else f"Bonus token: {step.bonus.text!r}."
    return f"A tree of {drafted} drafted tokens after the anchor {step.nodes[0].text!r}. Accepted: {accepted}. {end}"


def _tree(step: Step, layout: Layout) -> str:
    parts = []
    for depth, column in enumerate(layout.columns):
        if depth % 2:
            height = layout.height - MARGIN / 2
            parts.append(
                f'<rect class="band" x="{column.x - 8:g}" y="4" width="{column.width + 16:g}" '
                f'height="{height - 4:g}" rx="6"/>'
            )
        name = f"+{depth}" if depth else "anchor"
        parts.append(f'<text class="head" x="{column.x + column.width / 2:g}" y="{HEAD - 7}">{name}</text>')
    drawn = sorted(enumerate(step.nodes), key=lambda item: item[1].accepted)  # the accepted path is drawn last, on top
    parts += [
        _halo(layout.boxes[step.nodes.index(node)], step.saver) for node in step.gained[step.right :][: step.saved > 0]
    ]
    parts += [_edge(layout.boxes[n.parent], layout.boxes[i], n) for i, n in drawn if n.parent >= 0]
    parts += [_node(layout.boxes[i], n, i == step.miss) for i, n in enumerate(step.nodes)]
    return "\n".join(parts)


def _halo(box: Box, saver: Source | None) -> str:
    """The highlight around the node that rescued the step."""
    place = f'x="{box.x - 5:g}" y="{box.y - 5:g}" width="{box.width + 10:g}" height="{BOX + 10}"'
    return f'<rect class="halo by-{saver}" {place} rx="17"/>'


def _node(box: Box, node: Node, miss: bool) -> str:
    """Borders show the source without colour: square for the first pass, round for the second, dashed for a copy."""
    radius = BOX / 2 if node.source == "second" else 5
    shown = cut(visible(node.text), MOST_CELLS)
    # Fallback fonts may have glyphs of another width.
    fitted = (
        "" if shown.replace("·", "").isascii() else f' textLength="{cell_len(shown) * 7.2:.4g}" lengthAdjust="spacing'
    )
    fitted += 'AndGlyphs"' if fitted else ""
    number = ""
    if node.source in DRAFTED:
        number = f'<text class="p" x="{box.x + box.width - PAD + 1:g}" y="{box.y + 15.5:g}">{_percent(node)}</text>'
    return (
        f'<g class="{_classes(node)}{" miss" * miss}"><title>{escape(_tip(node))}</title>'
        f'<rect class="box" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{BOX}" rx="{radius:g}"/>'
        f'<text class="token" x="{box.x + PAD:g}" y="{box.y + 16:g}"{fitted}>{token_markup(node.text, MOST_CELLS)}'
        f"</text>{number}</g>"
    )


def _edge(parent: Box, child: Box, node: Node) -> str:
    start, end = parent.x + parent.width, child.x
    if parent.y == child.y:
        line = f"M{start:g} {parent.middle:g}H{end:g}"
    else:  # edges to siblings share a trunk
        trunk = start + (end - start) * 0.42
        line = (
            f"M{start:g} {parent.middle:g}H{trunk - _BEND:g}q{_BEND} 0 {_BEND} {_BEND}"
            f"V{child.middle - _BEND:g}q0 {_BEND} {_BEND} {_BEND}H{end:g}"
        )
    return f'<path class="edge {_classes(node)}" d="{line}"/>'


def _classes(node: Node) -> str:
    return f"{node.source} yes" if node.accepted and node.source in DRAFTED else node.source


def _percent(node: Node) -> str:
    return f"{node.probability:.0%}" if node.probability >= 0.005 else "&lt;1%"


def _tip(node: Node) -> str:
    """The tooltip of a node."""
    if node.source == "anchor":
        return f"{node.text!r}\nanchor: the last token of the answer so far"
    if node.source == "bonus":
        return f"{node.text!r}\nbonus: the target's own choice after the accepted path"
    who = {"first": "first pass", "second": f"branch {node.branch} of the second pass", "copy": "copy of earlier text"}
    fate = "accepted" if node.accepted else "rejected"
    return f"{node.text!r}\n{who[node.source]}, {fate}\nprobability given its parent: {node.probability:.1%}"


_LINE = 26
_SAMPLE = 30


def _entries(steps: Sequence[Step]) -> list[tuple[str, int, str]]:
    """(class, corner radius, text) of each entry of the legend that `steps` need."""
    sources = {node.source for step in steps for node in step.nodes}
    boxes = {"first": (5, "first draft"), "second": (10, "second pass"), "copy": (5, "copy of earlier text")}
    keys: list[tuple[str, int, str]] = [("anchor", 5, "last token so far")]
    keys += [(name, *boxes[name]) for name in DRAFTED if name in sources]
    drafted = not sources.isdisjoint(DRAFTED)
    if drafted:
        keys.append(("yes", 5, "accepted by the target"))
    if any(step.miss is not None for step in steps):
        keys.append(("miss", 5, f"first wrong token of the {'first draft' if 'first' in sources else 'copy'}"))
    savers = {step.saver for step in steps}
    names = (("first", "another guess"), ("second", "the second pass"), ("copy", "a copy"))
    keys += [(f"rescue by-{who}", 10, f"{name} saved the step here") for who, name in names if who in savers]
    keys.append(("bonus", 5, "bonus: the target's own"))
    if drafted:
        keys.append(("%", 0, "probability given its parent"))
    return keys


def _sample(kind: str, radius: int, x: float, y: float) -> str:
    if kind == "%":
        return f'<g><text class="p" x="{x + _SAMPLE - 2:g}" y="{y + 14:g}">62%</text></g>'
    box = f'<rect class="box" x="{x:g}" y="{y + 1:g}" width="{_SAMPLE}" height="18" rx="{radius}"/>'
    return f'<g class="{kind}">{box}</g>'


def legend(steps: Sequence[Step], width: float) -> tuple[str, float]:
    """The legend of `steps` as SVG at most `width` wide, and its height."""
    parts, x, y = [], 0.0, 0
    for kind, radius, text in _entries(steps):
        room = _SAMPLE + 7 + len(text) * CELL * 0.92 + 18
        if x and x + room > width:
            x, y = 0.0, y + _LINE
        label = f'<text class="key" x="{x + _SAMPLE + 7:g}" y="{y + 14}">{text}</text>'
        parts.append(_sample(kind, radius, x, y) + label)
        x += room
    return "\n".join(parts), y + _LINE + 8.0
