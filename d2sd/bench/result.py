"""`result.json`: the measurements of `d2sd bench`, prompt by prompt; every table and plot is made from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from d2sd.errors import D2SDError
from d2sd.io import write_text
from d2sd.policies import DrafterName
from d2sd.schema import read_model

SCHEMA: Literal[1] = 1

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
#: Drafted tokens of one bin of predicted acceptance: how many, the sum of what was predicted, how many were accepted.
Bin = tuple[Count, Annotated[float, Field(ge=0)], Count]
#: Predicted acceptance 0 - 0.1, …, 0.9 - 1, given that all before in the path was accepted.
Bins = Annotated[list[Bin], Field(min_length=10, max_length=10)]


class ResultError(D2SDError):
    """A result file is missing, damaged, of another schema, or has nothing to compare."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Provenance(_Part):
    date: str
    command: str
    commit: str | None  # absent where d2sd does not run from a checkout
    versions: dict[str, str]
    machine: dict[str, str | int]
    bundle: dict[str, str]
    device: str


class Settings(_Part):
    """What all cells share."""

    per_set: Positive
    max_new_tokens: Positive
    block_size: Positive
    branches: Positive
    seed: Count


class Response(_Part):
    """One prompt's answer."""

    id: str
    accepted: Annotated[list[Positive], Field(min_length=1)]  # tokens committed by each step, bonus included
    tokens: Count  # of the answer: without what was committed past a stop token


class Difference(_Part):
    """The first token in which an answer is not plain decoding's."""

    request: Count  # place in the cell's requests
    token: Count
    gap: float  # of the two best scores there
    excused: bool  # the gap is a tie


class Key(NamedTuple):
    """What was varied: no two cells of a result are alike in all of it."""

    method: str
    rows: int
    set: str
    temperature: float
    concurrency: int

    def __str__(self) -> str:
        return f"{self.method}, {self.rows} rows, {self.set}, T = {self.temperature:g}, {self.concurrency} in flight"


class Cell(_Part):
    """One method on one set. A request-step is one decode step of one request."""

    method: str
    rows: Positive  # row budget
    set: str
    temperature: Annotated[float, Field(ge=0)]
    concurrency: Positive
    requests: Annotated[list[Response], Field(min_length=1)]
    policies: dict[str, Count]  # served -> request-steps: a method is one policy, but `auto` changes between them
    verified_rows: Count  # over request-steps, as all counts below
    nodes: Count  # valid ones
    merged: Count
    boundary_rank: dict[str, Count]  # rank of the true rejection among the branches, or "none" -> request-steps
    rescued: Count  # the second pass carried acceptance beyond the first draft's chain
    calibration: dict[DrafterName, Bins]
    stage_seconds: dict[str, Seconds]
    steps: Positive  # of the engine: one may serve several requests
    wall_seconds: Annotated[float, Field(gt=0)]
    differences: list[Difference]

    @model_validator(mode="after")
    def _consistent(self) -> Cell:
        if len({one.id for one in self.requests}) < len(self.requests):
            raise ValueError(f"{self.key} has two requests of one id")
        if any(one.request >= len(self.requests) for one in self.differences):
            raise ValueError(f"{self.key} has a difference in a request that is not there")
        return self

    @property
    def key(self) -> Key:
        return Key(self.method, self.rows, self.set, self.temperature, self.concurrency)


class Result(_Part):
    d2sd_bench: Literal[1] = SCHEMA
    provenance: Provenance
    settings: Settings
    cells: Annotated[list[Cell], Field(min_length=1)]

    @model_validator(mode="after")
    def _no_cell_twice(self) -> Result:
        key, count = Counter(cell.key for cell in self.cells).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{count} cells are {key}")
        return self


def save(result: Result, path: Path) -> None:
    """Write the file whole or not at all; raises `ResultError`."""
    try:
        write_text(path, result.model_dump_json() + "\n")
    except (OSError, ValueError) as error:  # ValueError: a prompt's id with half a surrogate pair
        raise ResultError("The result cannot be written.", where=path, found=error) from None


def load_result(path: Path) -> Result:
    """Read and validate a result; raises `ResultError`."""
    fix = "name the JSON file that d2sd bench wrote, or run d2sd bench again"
    return read_model(Result, path, error=ResultError, what="result", version=("d2sd_bench", SCHEMA), fix=fix)
