"""Prompt sets of nine kinds, a file each, for `d2sd bench --prompts FOLDER`:

    python benchmarks/prompts/by_kind.py data/eval build/prompts

mathematics, code and chat are public sets whole; question answering, summaries, retrieval and translation are the
categories of spec_bench.jsonl; writing and tool calls are ours, in held_out.jsonl here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import click

from d2sd.prompts import read_rows

#: Files that are one kind, and those whose prompts have one each, in `category`.
WHOLE = ("gsm8k", "humaneval", "mbpp", "mt_bench")
BY_CATEGORY = ("spec_bench",)
#: Categories whose kinds have other names in results: those of their tables and plots.
NAMES = {"rag": "retrieval", "summarization": "summaries", "tool_call": "tools"}
OWN = Path(__file__).with_name("held_out.jsonl")


@click.command()
@click.argument("sets", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
def main(sets: Path, out: Path) -> None:
    """Write a file of prompts for each kind of text to the folder OUT, from the public SETS and our own."""
    kinds = {name: list(read_rows(sets / f"{name}.jsonl")) for name in WHOLE}
    mixed: dict[str, list[tuple[str, dict[str, object]]]] = defaultdict(list)
    for path in (*(sets / f"{name}.jsonl" for name in BY_CATEGORY), OWN):
        for where, row in read_rows(path):
            category = str(row["category"])
            mixed[NAMES.get(category, category)].append((where, row))
    out.mkdir(parents=True, exist_ok=True)
    for kind, rows in {**kinds, **mixed}.items():
        lines = [json.dumps({"id": row["id"], "turns": row["turns"]}) for _, row in rows]
        (out / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
        click.echo(f"{kind}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
