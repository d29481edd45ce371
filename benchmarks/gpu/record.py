"""The suite's measurements in one JSON file, written after every case: a kill loses only the running case.

    {"d2sd_bench": 1, "environment": {...}, "rows": {"times/8192x32 ...": {"status": "ok", ...}, ...}}

status   ok        measured; never measured again
         skipped   cannot be measured here, `reason` says why
         refused   kernels of d2sd would not have run, for the reason in `reason`: there is no figure
         failed    an error or a wrong result, in `reason`
         started   in flight; found by the driver after a process has died, and made into
         died      with the exit status; what the case had noted until then stays in its row
         no time   its turn did not come

The next call of the suite goes on: it keeps the rows that are ok and takes up the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from d2sd.bench.result import ResultFile, load, save
from d2sd.errors import D2SDError

#: Figures measured under different values of these must not be in one file.
SAME = ("device", "torch", "triton", "code")
Row = dict[str, Any]


class Suite(ResultFile):
    """`gpu.json`."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # a dry run has no times
    environment: dict[str, Any]
    rows: dict[str, Row]


class Record:
    """The file `gpu.json` of a folder, read when made."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gpu.json"
        self.environment: dict[str, Any] = {}
        self.rows: dict[str, Row] = {}
        if self.path.exists():
            found = load(Suite, self.path, "remove it, or another --out")
            self.environment, self.rows = found.environment, found.rows

    def resume(self, environment: dict[str, Any]) -> None:
        """Store the environment; raises `D2SDError` if the file has another machine or other code."""
        self.matches(environment)
        self.environment = environment
        self.rows = {key: row for key, row in self.rows.items() if row["status"] == "ok"}
        self.write()

    def matches(self, environment: dict[str, Any]) -> None:
        """Raise `D2SDError` if figures of this environment must not be in the file."""
        for name in SAME if self.rows else ():
            if self.environment.get(name) != environment.get(name):
                raise D2SDError(
                    "The file is of another environment.",
                    where=f"{self.path}: {name}",
                    found=self.environment.get(name),
                    expected=environment.get(name),
                    fix="another --out, or remove that file",
                )

    def put(self, key: str, status: str, **more: Any) -> None:
        """Set the status of a case, and add to its row."""
        self.rows.setdefault(key, {}).update(more, status=status)
        self.write()

    def bury(self, reason: str) -> list[str]:
        """Mark running cases as died; returns their keys."""
        dead = [key for key, row in self.rows.items() if row["status"] == "started"]
        for key in dead:
            self.put(key, "died", reason=reason)
        return dead

    def write(self) -> None:
        """Write the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save(Suite(environment=self.environment, rows=self.rows), self.path, indent=1)
