"""The colours, and how a tree wears them: the outline says who drafted a token, the fill what became of it."""

from __future__ import annotations

FONT = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, "Liberation Mono", monospace'

#: For a picture on its own and, once, for a page full of them. The card is white on dark pages too.
TREE_STYLE = f"""
.tree {{ font: 12px {FONT}; background: #fff; border-radius: 10px; }}
.tree .card {{ fill: #fff; stroke: #e2e8f0; }}
.tree .band {{ fill: #f8fafc; }}
.tree text {{ fill: #64748b; white-space: pre; }}
.tree .head {{ font-size: 10px; text-anchor: middle; }}
.tree .caption {{ font-size: 14px; font-weight: 700; fill: #0f172a; }}
.tree .key {{ font-size: 11px; fill: #475569; }}
.tree .p {{ font-size: 9px; text-anchor: end; }}
.tree .edge {{ fill: none; stroke: #cbd5e1; stroke-width: 1.3; }}
.tree .edge.second {{ stroke: #d6ccfb; }}
.tree .edge.yes {{ stroke: #16a34a; stroke-width: 3; stroke-linecap: round; }}
.tree .edge.bonus {{ stroke: #f59e0b; stroke-width: 3; stroke-dasharray: 1 5; stroke-linecap: round; }}
.tree rect.box {{ fill: #fff; stroke: #b6c2d1; stroke-width: 1.2; }}
.tree .second rect.box {{ stroke: #bda9f7; }}
.tree .yes rect.box {{ fill: #d9fbe5; stroke: #4b6584; stroke-width: 2; }}
.tree .yes.second rect.box {{ stroke: #7c3aed; stroke-width: 2.4; }}
.tree .yes text.token {{ fill: #14532d; font-weight: 700; }}
.tree .yes .p {{ fill: #15803d; }}
.tree .miss rect.box {{ stroke: #ef4444; stroke-width: 1.6; }}
.tree .miss text.token {{ fill: #b91c1c; text-decoration: line-through; }}
.tree .halo {{ fill: #ddd6fe; }}
.tree .rescue rect.box {{ stroke: #ddd6fe; stroke-width: 4; }}
.tree .anchor rect.box {{ fill: #1e293b; stroke: #1e293b; }}
.tree .anchor text.token {{ fill: #fff; }}
.tree .bonus rect.box {{ fill: #fef3c7; stroke: #d97706; stroke-width: 2; }}
.tree .bonus text.token {{ fill: #78350f; font-weight: 700; }}
""".strip()
