"""Results made by hand."""

from __future__ import annotations

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
