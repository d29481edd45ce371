"""Times decode steps of every policy by batch size, node budget and branches: Qwen3-8B's geometry, random weights.

`auto` chooses among such steps, and whether a second drafter pays is decided by them: the tokens that a policy commits
a step, measured elsewhere, over its milliseconds here. Products are in the forms that a bundle is served with. One set
of models after the other is made: bf16, FP8 drafters with 32k drafted ids behind a bf16 target ("mixed"), and FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Note, said
from benchmarks.gpu.steps import DRAFTED, Step, made, timed
from d2sd.bundle import product_times
from d2sd.bundle.product_times import choose_products
from d2sd.policies import PolicyName

BATCHES = (1, 8, 4, 16, 2, 32)
#: Policy, nodes, branches.
TREES: tuple[tuple[PolicyName, int, int], ...] = (
    ("off", 1, 4),
    ("chain", 16, 4),
    ("ddtree", 16, 4),
    ("ddtree", 64, 4),
    ("hybrid", 16, 1),
    ("hybrid", 16, 4),
    ("hybrid", 64, 1),
    ("hybrid", 64, 4),
)
#: Steps whose kernels are listed.
PROFILED = (("off", 1, 1), ("hybrid", 64, 1), ("hybrid", 64, 8))


def cases() -> Iterator[Case]:
    for kind, drafted in (("bf16", None), ("mixed", DRAFTED[1]), ("fp8", DRAFTED[1])):
        steps = [
            Step(name, kind, batch, drafted, nodes=nodes if name != "off" else 64, branches=branches)
            for batch in BATCHES
            for name, nodes, branches in TREES
            if (name, kind) != ("off", "mixed")  # bf16's
        ]
        for one in steps:
            yield f"budgets/{one.name}", partial(budget, one)
        yield f"budgets/{kind} products", partial(products, steps[-1])
        for name, nodes, batch in PROFILED:
            if (name, kind) != ("off", "mixed"):
                profiled = Step(name, kind, batch, drafted, nodes=nodes if name != "off" else 64)
                yield f"budgets/{profiled.name} profile", partial(budget, profiled, eager=True)


@torch.inference_mode()
def budget(one: Step, note: Note, device: str = "cuda", *, eager: bool = False) -> dict[str, Any]:
    """Milliseconds of a captured step, with its products in their fastest forms."""
    runner, figures = made(one, device), dict[str, Any]()
    try:
        choose_products(runner, None)
    except Exception as error:  # PyTorch's products are a figure too
        figures["products"] = said(error)
    figures = timed(one, runner, note, figures, eager=eager)
    return figures | {"batch": one.batch, "policy": one.policy, "nodes": one.nodes, "branches": one.branches}


def products(one: Step, note: Note, device: str = "cuda") -> dict[str, Any]:
    """Microseconds of every form of the products so far, by shape and bucket of rows, cold and several in a graph."""
    path = product_times._path(device) if device == "cuda" else None
    times = {} if path is None else product_times.read(path)
    found = {}
    for (shape, rows), forms in times.items():
        name = f"{shape.dtype} {shape.outputs}x{shape.inputs} r{rows}"
        found[name] = {form: round(1e6 * seconds, 2) for form, seconds in forms.items()}
    return {"microseconds": found}
