"""Results made by hand."""

from __future__ import annotations

import random
from typing import Any

from d2sd.bench.result import Cell, Provenance, Response, Result, Settings
from d2sd.runtime.stats import Bin

PROVENANCE = Provenance(
    date="2026-11-20",
    command="d2sd bench bundles/tiny",
    commit="811d788",
    versions={"torch": "2.13.0"},
    machine={"cpu": "EPYC", "cores": 2},
    bundle={"name": "tiny"},
    device="cpu",
)
SETTINGS = Settings(per_set=2, max_new_tokens=64, block_size=8, branches=7, seed=0)


def cell(method: str = "chain", *accepted: list[int], **changed: Any) -> Cell:
    """One request for every list of accepted lengths, with ids "0", "1", …; everything else is quiet."""
    requests = [Response(id=str(i), accepted=steps, tokens=sum(steps)) for i, steps in enumerate(accepted or ([1],))]
    values: dict[str, Any] = {
        "method": method,
        "rows": 1 if method == "off" else 8,
        "set": "gsm8k",
        "temperature": 0.0,
        "concurrency": 1,
        "requests": requests,
        "policies": {},
        "verified_rows": 0,
        "nodes": 0,
        "merged": 0,
        "rescued": 0,
        "boundary_rank": {},
        "calibration": {},
        "stage_seconds": {},
        "steps": 1,
        "wall_seconds": 1.0,
        "differences": [],
    }
    return Cell.model_validate({**values, **changed})


def result(*cells: Cell, **changed: Any) -> Result:
    return Result.model_validate({"provenance": PROVENANCE, "settings": SETTINGS, "cells": list(cells), **changed})


def bins(**of: Bin) -> list[Bin]:
    """bins(b9=(10, 9.5, 9)): the tenth bin; the others are empty."""
    return [of.get(f"b{i}", (0, 0.0, 0)) for i in range(10)]


def sweep(prompts: int = 12) -> Result:
    """Everything at once, as a long run would give it: methods x rows x sets x temperatures x concurrencies."""
    rng = random.Random(0)
    skill = {"off": 0.0, "lookup": 0.25, "chain": 0.5, "reanchor": 0.55, "d2sd": 0.62, "ddtree": 0.6, "hybrid": 0.66}
    cells = []
    for concurrency in (1, 4, 16):
        for temperature in (0.0, 1.0):
            for name in ("gsm8k", "humaneval", "mt_bench"):
                for method, p in skill.items():
                    for rows in (1,) if method == "off" else (8,) if method in ("lookup", "chain") else (8, 16, 64):
                        cells.append(_random_cell(rng, method, rows, name, temperature, concurrency, p, prompts))
    return result(*cells)


def _random_cell(
    rng: random.Random, method: str, rows: int, name: str, temperature: float, concurrency: int, p: float, prompts: int
) -> Cell:
    p = p * (0.8 if temperature else 1.0) * (1 + 0.03 * (rows > 8) + 0.03 * (rows > 16))

    def accepted() -> int:
        n = 1
        while n < 8 and rng.random() < p:
            n += 1
        return n

    lists = [[accepted() for _ in range(30)] for _ in range(prompts)]
    steps = 30 * prompts // concurrency + 1
    first, second = method not in ("off", "lookup"), method in ("reanchor", "d2sd", "hybrid")
    verify = 0.010 + 0.0005 * rows * concurrency
    seconds = {"verify": verify, "accept": 0.001, "commit": 0.002, "retire": 0.0005}
    seconds |= {"draft_first": 0.004, "build_tree": 0.001} if first else {}
    seconds |= {"pick_boundaries": 0.0005, "draft_second": 0.009} if second else {}
    counts = [rng.randrange(20, 900) for _ in range(10)]
    told = [(n, n * (i + 0.5) / 10, round(n * (i + rng.random()) / 10)) for i, n in enumerate(counts)]
    return cell(
        method,
        *lists,
        rows=rows,
        set=name,
        temperature=temperature,
        concurrency=concurrency,
        verified_rows=30 * prompts * rows,
        nodes=30 * prompts * rows,
        merged=60 * prompts if second else 0,
        boundary_rank={"0": 90, "1": 40, "none": 20} if second else {},
        rescued=10 * prompts if second else 0,
        calibration=({"first": told} if first else {}) | ({"second": told} if second else {}),
        stage_seconds={k: v * steps for k, v in seconds.items()} | {"prefill": 1.0},
        steps=steps,
        wall_seconds=steps * sum(seconds.values()) + 1.0,
    )
