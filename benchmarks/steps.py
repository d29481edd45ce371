"""Record what every policy does step by step, and compare with an earlier record: for changes that must change nothing.

    python benchmarks/steps.py bundles/smollm2-135m record.json     # before: writes the file
    python benchmarks/steps.py bundles/smollm2-135m record.json     # after: compares with it

Of 16 prompts at T = 0 and 1, batch 1 and 8, it keeps the answers, and of every step the accepted length, the number of
nodes and a hash of the tree. It takes about 25 CPU minutes and resumes after an interruption. Exits with 1 where
anything differs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import click

from d2sd.bundle.load import load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import can_run, make_engine
from d2sd.cli.report import Reporting
from d2sd.io import read_json, write_text
from d2sd.policies import NAMES
from d2sd.prompts import OWN_PROMPTS, read_prompts
from d2sd.runtime.decode import StepTrace
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams

PROMPTS, NEW_TOKENS = 16, 24


def record(engine: Engine, requests: Iterable[Request]) -> list[dict[str, Any]]:
    """Answer `requests` together; one entry for each, as JSON values."""
    engine.record_trace = True
    sequences = [engine.submit(request) for request in requests]
    steps: dict[int, list[list[object]]] = {sequence.id: [] for sequence in sequences}
    while engine.busy:
        if engine.step() and engine.trace is not None:
            for row, sequence in enumerate(engine.trace.sequences):
                steps[sequence.id].append(_step(engine.trace, row))
    return [{"answer": s.answer, "finish": s.finish, "steps": steps[s.id]} for s in sequences]


def _step(trace: StepTrace, row: int) -> list[object]:
    """Accepted length, number of nodes, hash of their tokens and parents."""
    nodes = int(trace.tree.valid[row].sum())
    tree = json.dumps([trace.tree.tokens[row, :nodes].tolist(), trace.tree.parent[row, :nodes].tolist()])
    return [int(trace.accepted.count[row]), nodes, hashlib.sha256(tree.encode()).hexdigest()[:12]]


@click.command(cls=Reporting)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
def main(bundle: Path, file: Path) -> None:
    """Record the steps of BUNDLE's policies in FILE or, where FILE is complete, compare with it."""
    loaded = load_bundle(bundle)
    texts = [text for _, text in read_prompts(OWN_PROMPTS)[:PROMPTS]]
    known = read_json(file) if file.exists() else {}
    names = [name for name in NAMES if can_run(loaded.draft_configs, name)]
    cells = [f"{name} T={heat} batch={size}" for name, heat, size in product(names, (0.0, 1.0), (1, 8))]
    compare, different = all(cell in known for cell in cells), 0
    for cell, (name, heat, size) in zip(cells, product(names, (0.0, 1.0), (1, 8)), strict=True):
        if cell in known and not compare:
            continue
        params = [SamplingParams(heat, 0.95 if i % 3 == 0 else 1.0, seed=i + 1) for i in range(len(texts))]
        requests = [chat_request(loaded, t, p, NEW_TOKENS) for t, p in zip(texts, params, strict=True)]
        found = record(make_engine(loaded, policy=name, max_batch=size), requests)
        if compare:
            equal = sum(one == other for one, other in zip(found, known[cell], strict=True))
            different += equal < len(found)
            click.echo(f"{cell}: {equal} of {len(found)} equal")
        else:
            known[cell] = found
            write_text(file, json.dumps(known))
            click.echo(cell)
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
