"""The suite's measurements in one JSON file, written after every case: a kill loses only the running case.

    {"schema": 1, "environment": {...}, "rows": {"times/8192x32 ...": {"status": "ok", ...}, ...}}

status   ok        measured; never measured again
         skipped   cannot be measured here, `reason` says why
         failed    an error or a wrong result, in `reason`
         started   in flight; found by the driver after a process has died, and made into
         died      with the exit status; what the case had noted until then stays in its row
         no time   its turn did not come

The next call of the suite goes on: it keeps the rows that are ok and takes up the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from d2sd.errors import D2SDError
from d2sd.io import write_text

SCHEMA = 1
#: Figures measured under different values of these must not be in one file.
SAME = ("device", "torch", "triton", "code")
Row = dict[str, Any]


class Record:
    """The file `gpu.json` of a folder, read when made."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gpu.json"
        self.environment: dict[str, Any] = {}
        self.rows: dict[str, Row] = {}
        if self.path.exists():
            found = _read(self.path)
            self.environment, self.rows = found["environment"], found["rows"]

    def resume(self, environment: dict[str, Any]) -> None:
        """Store the environment; raises `D2SDError` if the file has another machine or other code."""
        for name in SAME if self.rows else ():
            if self.environment.get(name) != environment.get(name):
                raise D2SDError(
                    "The file is of another environment.",
                    where=f"{self.path}: {name}",
                    found=self.environment.get(name),
                    expected=environment.get(name),
                    fix="another --out, or remove that file",
                )
        self.environment = environment
        self.rows = {key: row for key, row in self.rows.items() if row["status"] == "ok"}
        self.write()

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
        text = json.dumps({"schema": SCHEMA, "environment": self.environment, "rows": self.rows}, indent=1)
        write_text(self.path, text + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        schema = found["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise D2SDError("Not a result of the GPU suite.", where=path, found=error, fix="remove it") from error
    if schema != SCHEMA:
        raise D2SDError(
            "The result has another schema.", where=path, found=schema, expected=SCHEMA, fix="another --out"
        )
    done: dict[str, Any] = found
    return done
