"""Runs lanes of checks and stamps each with the commit it ran on.

    python -m tests.lanes [LANE] ...       # without a name: every lane that is red, stale or was never run
    python -m tests.lanes --list           # what state each is in; runs nothing

Writes docs/results/checks.json and its page, checks.md, after each lane, so that an interrupted run goes on where it
was. Logs are in build/checks. Ends with 1 if a lane that ran is red, or, with --list, if any lane is not green.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone

from tests.lanes.lane import ROOT, Lane, Stamp, counted, git, state
from tests.lanes.table import LANES, RESULTS

STAMPS = ROOT / "docs" / "results" / "checks.json"
PAGE = STAMPS.with_suffix(".md")
LOGS = ROOT / "build" / "checks"


def read_stamps() -> dict[str, Stamp]:
    if not STAMPS.exists():
        return {}
    found = json.loads(STAMPS.read_text("utf-8"))
    return {name: Stamp(**found[name]) for name in LANES if name in found}


def page(stamps: Mapping[str, Stamp]) -> str:
    """The table of all lanes."""
    rows = [
        "| lane | what it shows | passed | failed | skipped | minutes | commit | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, lane in LANES.items():
        begin = f"| `{name}` | {lane.proves} |"
        if stamp := stamps.get(name):
            counts = f"{stamp.passed:,} {lane.unit} | {stamp.failed} | {stamp.skipped} | {stamp.seconds / 60:.0f}"
            rows.append(f"{begin} {counts} | `{stamp.commit[:8]}` | {stamp.date} |")
        else:
            rows.append(f"{begin} never run | | | | | |")
    return "\n".join(
        [
            "# Checks",
            "",
            "Every lane of `make checks`, the commit on which it last ran, and what it found, on two CPU cores without",
            "a GPU. `make checks LANES=--list` says which are stale: something that they cover has changed since.",
            "Written by `make checks`; what no GPU has run is in the [ledger](../gpu.md).",
            "",
            *rows,
            "",
        ]
    )


def write(stamps: Mapping[str, Stamp]) -> None:
    text = json.dumps({name: stamps[name].to_json() for name in LANES if name in stamps}, indent=1)
    STAMPS.write_text(f"{text}\n", "utf-8")
    PAGE.write_text(page(stamps), "utf-8")


def run(name: str, lane: Lane) -> Stamp:
    """Run the lane, its output in a log and on the terminal."""
    LOGS.mkdir(parents=True, exist_ok=True)
    commit, start, lines = git("rev-parse", "HEAD"), time.perf_counter(), []
    command = ["make", "--no-print-directory", *lane.command]
    with (
        (LOGS / f"{name}.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            print(line, end="", flush=True)
            lines.append(line)
    passed, failed, skipped = counted(lane, "".join(lines), process.returncode)
    today = datetime.now(timezone.utc).date().isoformat()
    return Stamp(commit, today, passed, failed, skipped, round(time.perf_counter() - start))


def main(arguments: list[str]) -> int:
    stamps = read_stamps()
    states = {name: state(lane, stamps.get(name)) for name, lane in LANES.items()}
    if arguments == ["--list"]:
        for name, found in states.items():
            print(f"{name:<14} {LANES[name].minutes:>3} min  {found}")
        return int(any(found != "green" for found in states.values()))
    if unknown := set(arguments) - set(LANES):
        print(f"no lane is called {', '.join(sorted(unknown))}; there are {', '.join(LANES)}", file=sys.stderr)
        return 2
    if files := git("status", "--porcelain", "--", ".", RESULTS):
        print(f"commit first: a stamp names a commit, and these differ from it:\n{files}", file=sys.stderr)
        return 2
    red = []
    for name in arguments or [name for name, found in states.items() if found != "green"]:
        print(f"--- {name}: {LANES[name].proves} (some {LANES[name].minutes} minutes)", flush=True)
        stamp = run(name, LANES[name])
        write(read_stamps() | {name: stamp})  # another process may have run one meanwhile
        red += [name] if stamp.failed else []
        print(f"--- {name}: {stamp.passed} passed, {stamp.failed} failed, {stamp.skipped} skipped", flush=True)
    print(f"red: {', '.join(red)}" if red else "green")
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
