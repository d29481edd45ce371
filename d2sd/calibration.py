"""`calibration.json`: Platt parameters of drafters, and the tokens a step that their trees gained."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from d2sd.errors import CheckpointError
from d2sd.io import write_text
from d2sd.policies import FACTS, DrafterName, DrafterRole, DraftUse, PolicyName, UseName, parse_method
from d2sd.schema import Closed, read_model

NAME = "calibration.json"


#: By temperature (0, 1), role of the drafter, distance and kind of candidate (best, sibling).
Table = list[list[list[list[float]]]]


class CopyTable(Closed):
    """`CopyOdds` of a temperature, with the entries of `d2sd.plugins.lookup.types`."""

    length: Annotated[list[float], Field(min_length=7, max_length=7)]
    support: Annotated[list[float], Field(min_length=8, max_length=8)]
    slot: list[float]


#: Of policies that take the likeliest tokens alone: by temperature (0, 1) and distance.
Line = Annotated[list[list[float]], Field(min_length=2, max_length=2)]


class UseTable(Closed):
    """Platt parameters of a `DraftUse` that takes the best candidates alone."""

    slope: Line
    offset: Line


class CalibrationFile(Closed):
    """Written by `d2sd calibrate`; read by the build, which compares the fingerprints with its drafters'."""

    d2sd_calibration: Literal[1] = 1
    #: Fingerprints by name.
    drafters: dict[DrafterName, str]
    block_size: Annotated[int, Field(ge=2)]
    slope: Table
    offset: Table
    #: of uses that are like another (`DraftUse.like`); those that are missing have the parameters of that one, as all
    #: have in files that were written before
    uses: dict[UseName, UseTable] = Field(default={})
    #: odds of copies of earlier text; files that were written before have none
    copies: dict[Literal["0", "1"], CopyTable] | None = None
    #: tokens a step by temperature ("0", "1") and policy, with copies under `hybrid+lookup`, with fewer branches than
    #: the recipe's under `hybrid/1`, of which older files have none; entry n is for n + 1 nodes
    tau: dict[Literal["0", "1"], dict[str, list[Annotated[float, Field(ge=1)]]]]
    #: what it was fitted on, and the expected calibration error before and after
    report: dict[str, float]

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.tau.keys() != {"0", "1"}:
            raise ValueError(f"tau must be at the temperatures 0 and 1, not {', '.join(sorted(self.tau))}")
        for policy in sorted(self.tau["0"].keys() | self.tau["1"].keys()):
            if not all(curves.get(policy) for curves in self.tau.values()):
                raise ValueError(f"tau of {policy} is missing or empty at a temperature")
        if not self.drafters:
            raise ValueError("drafters is empty: nothing is calibrated")
        if "second" in self.drafters and "first" not in self.drafters:
            raise ValueError("drafters.second is a second drafter without a first one")
        runs = {policy: self._run_by(policy) for policy, facts in FACTS.items() if facts.forecast_by}
        told = {policy: names for policy, names in runs.items() if policy in self.tau["0"]}
        recorded = set[str]().union(*told.values())
        for policy, names in runs.items():
            # a policy that is newer than the file has no tau, and `auto` leaves it out; its drafters have others'
            if not (names <= recorded if names <= self.drafters.keys() else policy not in told):
                named = " and ".join(sorted(names))
                raise ValueError(f"drafters.{named}, fingerprints, and tau of {policy} belong together: all, or none")
        if not all(a > 0 for warm in self.slope for drafter in warm for pair in drafter for a in pair):
            raise ValueError("a slope is not above 0: it would reverse the order of the candidates")
        shape = [2, len(DrafterRole), self.block_size - 1, 2]
        for table in (self.slope, self.offset):
            pairs = [pair for drafters in table for distances in drafters for pair in distances]
            sizes = [len(table), *{len(part) for part in table}, *{len(d) for part in table for d in part}]
            if [*sizes, *{len(pair) for pair in pairs}] != shape:
                raise ValueError(f"slope and offset must have the shape {shape}")
        for use, own in self._tables():
            if use.like == use:
                raise ValueError(f"uses.{use.key}: its parameters are in slope and offset")
            if not _needs(use) <= self.drafters.keys():
                raise ValueError(f"uses.{use.key} needs the fingerprints of {' and '.join(sorted(_needs(use)))}")
            if {len(part) for part in (*own.slope, *own.offset)} != {shape[2]}:
                raise ValueError(f"uses.{use.key} must have {shape[2]} distances at each temperature")
            if not all(a > 0 for part in own.slope for a in part):
                raise ValueError(f"uses.{use.key}: a slope is not above 0")
        if self.copies is not None and [len(odds.slot) for odds in self.copies.values()] != [shape[2]] * 2:
            raise ValueError(f"copies must have {shape[2]} slots at the temperatures 0 and 1")
        return self

    @property
    def roles(self) -> list[DrafterRole]:
        """The drafters that it was fitted to."""
        return [role for role in DrafterRole if role.key in self.drafters]

    def among(self, roles: Collection[DrafterRole]) -> CalibrationFile:
        """The part about a bundle with these drafters alone: where the first drafter makes the second pass too, the
        second's scores and forecasts do not apply.
        """
        kept = [role for role in self.roles if role in roles]
        if not kept or kept == self.roles:
            return self
        names = {role.key for role in kept}
        runs: dict[str, set[DrafterName]] = {policy: self._run_by(policy) for policy in FACTS}
        tau = {
            key: {
                name: curve
                for name, curve in curves.items()
                if runs.get(parse_method(name)[0].split("/")[0], set()) <= names
            }
            for key, curves in self.tau.items()
        }
        drafters = {name: mark for name, mark in self.drafters.items() if name in names}
        uses = {use.key: table for use, table in self._tables() if _needs(use) <= names}
        slope, offset = (_rows_of(table, kept, value) for table, value in ((self.slope, 1.0), (self.offset, 0.0)))
        return self.model_copy(
            update={"drafters": drafters, "tau": tau, "slope": slope, "offset": offset, "uses": uses}
        )

    def deepened(self, depth: int) -> CalibrationFile:
        """The calibration for trees of `depth`: behind the block of its fit the last slot's entries hold on."""

        def longer(slots: list[Any]) -> list[Any]:
            return [*slots, *[slots[-1]] * (depth - self.block_size)]

        def table(of: Table) -> Table:
            return [[longer(drafter) for drafter in warm] for warm in of]

        uses = {
            key: UseTable(slope=[*map(longer, use.slope)], offset=[*map(longer, use.offset)])
            for key, use in self.uses.items()
        }
        copies = self.copies and {
            key: odds.model_copy(update={"slot": longer(odds.slot)}) for key, odds in self.copies.items()
        }
        own = {"block_size": depth, "slope": table(self.slope), "offset": table(self.offset)}
        return self.model_copy(update={**own, "uses": uses, "copies": copies})

    def _tables(self) -> list[tuple[DraftUse, UseTable]]:
        return [(use, self.uses[use.key]) for use in DraftUse if use.key in self.uses]

    def _run_by(self, policy: PolicyName) -> set[DrafterName]:
        """The drafters that the policy ran when it was fitted."""
        return {role.key for role in FACTS[policy].among(self.roles).drafters}


def _needs(use: DraftUse) -> set[DrafterName]:
    """The drafters of a use that is like another: of both of its passes."""
    return {DrafterRole.FIRST.key, use.role.key}


def _rows_of(table: Table, roles: Collection[int], value: float) -> Table:
    """The table, in which all drafters but these have one value."""
    return [
        [rows if role in roles else [[value] * 2 for _ in rows] for role, rows in enumerate(warm)] for warm in table
    ]


def load_calibration(path: Path) -> CalibrationFile:
    """Read and validate; raises `CheckpointError` naming file and key."""
    return read_model(CalibrationFile, path, error=CheckpointError, what="calibration", fix="run d2sd calibrate")


def write_calibration(path: Path, calibration: CalibrationFile) -> None:
    """Write the file atomically, with one line per key."""
    lines = (
        f'"{key}": {json.dumps(value)}' for key, value in calibration.model_dump(mode="json", exclude_none=True).items()
    )
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
