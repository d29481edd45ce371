"""Where commands write, and what may be in the way there."""

from __future__ import annotations

import os
from pathlib import Path

from d2sd.io import MARKER

OBSTACLES = (
    *("file link", "folder link", "dangling", "loop", "device", "proc", "full", "pipe", "folder", "files"),
    *("text", "empty", "json", "mark"),
)
#: The folder that a command works in, next to its output.
WORK = {"build": ".out.building", "convert": ".out.partial"}
#: Where something may be in the way of an output; W is the work folder.
PLACES = (
    *("out", "out/x", "W", "W/lock", f"W/{MARKER}", "W/bundle", "W/bundle/target", "W/stages", "W/stages/target.json"),
    *("W/scratch", "W/hidden", "W/replaced", "W/checkpoint", "W/checkpoint/config.json"),
)


def put(place: Path, kind: str, victim: Path) -> None:
    """Put something unusual at `place`, unless it is taken: writing into a pipe would wait for its reader."""
    if os.path.lexists(place):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    links = {"file link": victim / "file", "folder link": victim, "dangling": victim / "none", "loop": place}
    links |= {"device": Path("/dev/zero"), "proc": Path("/proc/self/status"), "full": Path("/dev/full")}
    if kind in links:
        place.symlink_to(links[kind])
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "files":
        (place / "deep").mkdir(parents=True)
        (place / "deep" / "mine").write_text("mine")
    else:
        place.write_bytes({"text": b"mine", "empty": b"", "json": b"{}", "mark": b'{"d2sd": "other"}'}[kind])
        place.chmod(0o644 if kind != "empty" else 0)


def contents(folder: Path) -> dict[str, bytes]:
    """Path and bytes of every regular file below a folder, links not followed."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place) / name
            if file.is_file() and not file.is_symlink():
                found[str(file)] = file.read_bytes()
    return found
