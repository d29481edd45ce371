"""`result.json`: the measurements of `d2sd bench`, prompt by prompt; the source of every table and plot.

The files of all benchmarks are a `ResultFile`, saved and loaded here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from d2sd.errors import D2SDError
from d2sd.io import write_text
from d2sd.runtime.evaluation import AcceptedLengths, Evaluation
from d2sd.schema import read_model

SCHEMA: Literal[1] = 1

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class ResultError(D2SDError):
    """A result file is missing, damaged, of another schema, or shares no cell with another."""


_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Part(BaseModel):
    """A part of a result."""

    model_config = _STRICT


class ResultFile(Part):
    """The file of a benchmark, with the version of all their schemas."""

    d2sd_bench: Literal[1] = SCHEMA


File = TypeVar("File", bound=ResultFile)


class Provenance(Part):
    date: str
    command: str
    commit: str | None  # None if d2sd does not run from a checkout
    versions: dict[str, str]
    machine: dict[str, str | int]
    bundle: dict[str, str]
    device: str


class Settings(Part):
    """Settings common to all cells."""

    per_set: Positive
    max_new_tokens: Positive
    block_size: Positive
    branches: Positive
    seed: Count


class Response(AcceptedLengths):
    """The response to one prompt."""

    model_config = _STRICT

    tokens: Count  # of the response: without tokens committed past a stop token


class Difference(Part):
    """The first token in which a response differs from plain decoding's, or in a traced run from the timed one's."""

    request: Count  # index in the cell's requests
    token: Count  # index in the response
    gap: float  # margin of the two best scores there
    excused: bool  # the gap is a near-tie


class Key(NamedTuple):
    """The varied settings; unique among the cells of a result."""

    method: str
    rows: int
    set: str
    temperature: float
    concurrency: int

    def __str__(self) -> str:
        return f"{self.method}, {self.rows} rows, {self.set}, T = {self.temperature:g}, {self.concurrency} in flight"


class Cell(Evaluation):
    """One method on one set. A request-step is one decode step of one request. `rows` is the row budget."""

    model_config = _STRICT

    set: str
    temperature: Annotated[float, Field(ge=0)]
    concurrency: Positive
    requests: Annotated[list[Response], Field(min_length=1)]
    policies: dict[str, Count]  # policy -> request-steps: `auto` switches between policies, other methods have one
    verified_rows: Count  # over request-steps, as all counts below
    #: Of a traced run of its own, which has the same answers: nodes, merged, rescued, boundary_rank and calibration are
    #: of it, all other figures of the run that was served and timed. 0: both are one run.
    traced_steps: Count = 0
    nodes: Count  # valid ones
    merged: Count
    boundary_rank: dict[str, Count]  # rank of the true rejection among the branches, or "none" -> request-steps
    rescued: Count  # the second pass extended acceptance beyond the first draft's chain
    stage_seconds: dict[str, Seconds]
    steps: Positive  # engine steps: one may serve several requests
    wall_seconds: Annotated[float, Field(gt=0)]
    differences: list[Difference]

    @model_validator(mode="after")
    def _consistent(self) -> Cell:
        if len({request.id for request in self.requests}) < len(self.requests):
            raise ValueError(f"{self.key} has two requests with the same id")
        if any(difference.request >= len(self.requests) for difference in self.differences):
            raise ValueError(f"{self.key} has a difference in a request that is not there")
        return self

    @property
    def key(self) -> Key:
        return Key(self.method, self.rows, self.set, self.temperature, self.concurrency)


class Result(ResultFile):
    provenance: Provenance
    settings: Settings
    runs: str = ""  # which figures are of which run, in words; not in older files
    cells: Annotated[list[Cell], Field(min_length=1)]

    @model_validator(mode="after")
    def _no_cell_twice(self) -> Result:
        key, count = Counter(cell.key for cell in self.cells).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{count} cells are {key}")
        return self


def save(result: ResultFile, path: Path, *, indent: int | None = None) -> None:
    """Write the file atomically; raises `ResultError`."""
    try:
        write_text(path, result.model_dump_json(indent=indent) + "\n")
    except (OSError, ValueError) as error:  # ValueError: a lone surrogate in a prompt's id
        raise ResultError("The result cannot be written.", where=path, found=error) from None


def load(schema: type[File], path: Path, fix: str) -> File:
    """Read and validate a result; raises `ResultError`."""
    return read_model(schema, path, error=ResultError, what="result", version=("d2sd_bench", SCHEMA), fix=fix)


def load_result(path: Path) -> Result:
    """`load` what d2sd bench wrote."""
    return load(Result, path, "name the JSON file that d2sd bench wrote, or run d2sd bench again")
