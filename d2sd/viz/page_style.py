"""How the page looks, and the few lines of script that open what is linked to."""

from __future__ import annotations

from d2sd.viz.style import FONT

PAGE_STYLE = f"""
:root {{
  color-scheme: light dark;
  --paper: #f6f7f9; --card: #fff; --ink: #0f172a; --soft: #55637a; --line: #dfe4ec;
  --odd: #e7f6ec; --even: #d3ecdc; --saved: #f1ebff; --saved-even: #e0d4fe; --hover: #fde68a;
  --first: #4b6584; --second: #7c3aed; --bonus: #d97706; --wrong: #b91c1c; --right: #15803d;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --paper: #0d1219; --card: #161d27; --ink: #e6eaf0; --soft: #9aa8bb; --line: #2a3442;
    --odd: #16301f; --even: #1f4630; --saved: #281f47; --saved-even: #382a66; --hover: #6b5310;
    --first: #8ea6c3; --second: #b794ff; --bonus: #fbbf24; --wrong: #fca5a5; --right: #86efac;
  }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.6 system-ui, sans-serif; }}
main {{ max-width: 1160px; margin: 0 auto; padding: 40px 20px 80px; }}
h1 {{ font-size: 30px; line-height: 1.2; margin: 0 0 10px; letter-spacing: -0.01em; }}
h2 {{ font-size: 13px; text-transform: uppercase; letter-spacing: 0.08em; color: var(--soft); margin: 34px 0 8px; }}
.lead {{ font-size: 17px; max-width: 78ch; margin: 0; color: var(--soft); }}
mark {{ color: inherit; background: var(--saved-even); border-radius: 4px; padding: 1px 4px; }}
.hint {{ color: var(--soft); font-size: 14px; margin: 0 0 8px; }}
article + article {{ border-top: 2px solid var(--line); margin-top: 56px; }}
.prompt, .answer, .bars, .figures, details {{
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 18px;
}}
.prompt, .answer {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.prompt {{ border-left: 4px solid var(--first); }}
.answer {{ line-height: 2; }}
.answer a {{ color: inherit; text-decoration: none; background: var(--odd); border-radius: 4px; padding: 2px 0; }}
.answer a:nth-child(even) {{ background: var(--even); }}
.answer a:nth-child(n):hover, .answer a:nth-child(n):focus-visible {{ background: var(--hover); }}
.answer .second, u.second {{ text-decoration: underline var(--second) 2.5px; text-underline-offset: 4px; }}
.answer .bonus, u.bonus {{ text-decoration: underline var(--bonus) 2.5px; text-underline-offset: 4px; }}
.answer a.saved {{ background: var(--saved); }}
.answer a.saved:nth-child(even) {{ background: var(--saved-even); }}
.figures {{ display: flex; flex-wrap: wrap; gap: 10px 44px; margin-top: 16px; }}
.figures b {{ display: block; font-size: 26px; line-height: 1.25; }}
.figures span {{ color: var(--soft); font-size: 13px; }}
.bars {{ display: flex; flex-wrap: wrap; align-items: flex-end; gap: 10px 3px; }}
.bars a {{ display: flex; flex-direction: column-reverse; gap: 2px; padding: 3px 2px; border-radius: 5px; }}
.bars a:hover, .bars a:focus-visible {{ background: var(--hover); }}
.bars i, .keys i {{ display: inline-block; width: 13px; height: 13px; border-radius: 3px; }}
i.first {{ background: var(--first); }}
i.second {{ background: var(--second); }}
i.bonus {{ background: var(--bonus); }}
.keys {{ display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 8px 2px 0; font-size: 13px; color: var(--soft); }}
.keys span {{ display: inline-flex; align-items: center; gap: 6px; }}
.tools {{ display: flex; flex-wrap: wrap; gap: 10px; justify-content: space-between; align-items: center; }}
.tools {{ margin-bottom: 12px; }}
.tools .wide {{ min-width: 0; padding: 0; }}
button {{ font: inherit; font-size: 13px; padding: 3px 11px; margin-left: 6px; cursor: pointer; border-radius: 8px; }}
button {{ color: var(--ink); background: var(--card); border: 1px solid var(--line); }}
details {{ margin: 8px 0; padding: 0 16px; scroll-margin-top: 12px; }}
details.saved {{ border-left: 4px solid var(--second); }}
details:target {{ outline: 2px solid var(--second); }}
summary {{ display: flex; flex-wrap: wrap; align-items: center; gap: 10px; padding: 9px 0; cursor: pointer; }}
summary::before {{ content: "▸"; color: var(--soft); width: 0.7em; }}
details[open] > summary::before {{ content: "▾"; }}
summary b {{ min-width: 2.2em; color: var(--soft); font-variant-numeric: tabular-nums; }}
.tokens {{ display: flex; flex-wrap: wrap; gap: 4px; }}
code, table {{ font: 13px {FONT}; }}
code {{ padding: 2px 7px; border: 1.5px solid var(--first); border-radius: 5px; white-space: pre; }}
code.second {{ border-color: var(--second); border-radius: 12px; }}
code.bonus {{ border-color: var(--bonus); background: color-mix(in srgb, var(--bonus) 16%, transparent); }}
.badge {{ font-style: normal; font-size: 12.5px; font-weight: 600; color: var(--second); margin-left: auto; }}
details p {{ margin: 2px 0 10px; color: var(--soft); font-size: 15px; }}
.wide {{ overflow-x: auto; padding-bottom: 12px; }}
table {{ border-collapse: collapse; }}
th {{ font: 12px system-ui, sans-serif; color: var(--soft); text-align: left; padding: 1px 14px 1px 0; }}
td {{ padding: 1px 14px 1px 0; white-space: pre; }}
td.right {{ color: var(--right); }}
td.wrong {{ color: var(--wrong); text-decoration: line-through; }}
td.moot {{ color: var(--soft); opacity: 0.65; }}
td.first {{ color: var(--right); font-weight: 700; }}
td.second {{ color: var(--second); font-weight: 700; }}
td.bonus {{ color: var(--bonus); font-weight: 700; }}
""".strip()

SCRIPT = """
function reveal() {
  const step = document.getElementById(location.hash.slice(1));
  if (step && step.tagName === "DETAILS") { step.open = true; step.scrollIntoView({block: "start"}); }
}
addEventListener("hashchange", reveal);
for (const link of document.querySelectorAll("a[href^='#']")) link.addEventListener("click", () => setTimeout(reveal));
for (const button of document.querySelectorAll("button[data-show]")) button.addEventListener("click", () => {
  for (const step of button.closest("article").querySelectorAll("details"))
    step.open = button.dataset.show === "all" || button.dataset.show === step.className;
});
reveal();
"""
