"""A lane of checks: its command, what it covers, and the stamp of its last run."""

from __future__ import annotations

import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.code_alone import code_of

ROOT = Path(__file__).parents[2]
#: The closing line of pytest, or of any program that says so much.
PYTEST = r"(?=(?:\d+ [a-z]+,? )+in \d[\d.]*s)" + "".join(
    rf"(?:(?=.*?\b(?P<{name}>\d+) {name.rstrip('s')}))?" for name in ("passed", "failed", "skipped", "errors")
)


@dataclass(frozen=True)
class Lane:
    """One row of the table.

    `command` are arguments of make. `covers` are git pathspecs: a change of one of them makes the lane stale. `counts`
    is a pattern of the lines that say how much `passed`, `failed` and was `skipped`, in `unit`; what all of them say is
    added. `minutes` are those of two quiet cores, environments built before.
    """

    proves: str
    command: tuple[str, ...]
    covers: tuple[str, ...]
    minutes: int
    counts: str = PYTEST
    unit: str = "tests"


@dataclass(frozen=True)
class Stamp:
    """The last run of a lane."""

    commit: str
    date: str
    passed: int
    failed: int
    skipped: int
    seconds: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def counted(lane: Lane, output: str, status: int) -> tuple[int, int, int]:
    """Counts of passed, failed and skipped tests by the lane's output and exit status.

    A lane that ends with an error has failed once at least, and so has one in which nothing passed: a lane without a
    test that ran proves nothing.
    """
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for line in output.splitlines():
        if found := re.match(lane.counts, re.sub(r"\x1b\[[\d;]*m", "", line).strip("= ")):
            for name, value in found.groupdict(default="0").items():
                total["failed" if name == "errors" else name] += int(value)
    red = status != 0 or not total["passed"]
    return total["passed"], max(total["failed"], int(red)), total["skipped"]


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def changed(lane: Lane, stamp: Stamp) -> list[str] | None:
    """Files the lane covers that differ from those of its stamp's commit; None if the commit is unknown.

    Of Python it is code that counts, unless the lane covers documents too.
    """
    try:
        names = git("diff", "--name-only", stamp.commit, "--", *lane.covers).splitlines()
    except subprocess.CalledProcessError:
        return None
    return names if "." in lane.covers else [name for name in names if _differs(name, stamp.commit)]


def _differs(name: str, commit: str) -> bool:
    file = ROOT / name
    try:
        before = git("show", f"{commit}:{name}") if file.suffix == ".py" else ""
    except subprocess.CalledProcessError:  # it was not there
        return True
    if file.suffix != ".py" or not file.exists():
        return True
    return code_of(before.encode(), ".py") != code_of(file.read_bytes(), ".py")


def state(lane: Lane, stamp: Stamp | None) -> str:
    """ "green", or why the lane has to run: "never run", "red", or "stale" with a file that has changed."""
    if stamp is None:
        return "never run"
    if stamp.failed:
        return "red"
    files = changed(lane, stamp)
    if files is None:
        return "stale: its commit is unknown"
    return f"stale: {files[0]}{f' and {len(files) - 1} more' if len(files) > 1 else ''}" if files else "green"
