"""Small file rules shared by cache, build and bundle: hashes, canonical JSON, exclusive folders."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from d2sd.errors import BuildError
from d2sd.progress import Progress, silent

_CHUNK = 1 << 20


def sha256(path: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """Hash one file, reporting bytes as they are read."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def list_files(folder: Path) -> list[str]:
    """Every file below `folder`, as sorted POSIX paths relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def hash_files(folder: Path, names: list[str], progress: Progress = silent) -> dict[str, str]:
    """{name: sha256} of files below `folder`."""
    with progress(f"hashing {folder.name}", sum((folder / name).stat().st_size for name in names)) as advance:
        return {name: sha256(folder / name, advance) for name in names}


def digest(value: object) -> str:
    """Hash a JSON value by its canonical text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write canonical JSON, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    partial.replace(path)


@contextmanager
def exclusive(lock: Path, *, wait: bool) -> Iterator[None]:
    """Hold `lock` for this process alone; the kernel frees it if we are killed."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise BuildError("Another build of this output is running.", where=lock.parent) from None
        yield


@contextmanager
def disk_space(folder: Path, need: int, what: str) -> Iterator[None]:
    """Refuse to start `what` (a step that writes `need` bytes below `folder`) without room; say so if it runs out."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise BuildError(
            f"Not enough disk space for {what}.", where=folder, found=f"{free:,} bytes free", expected=f"{need:,} bytes"
        )
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BuildError(
            f"The disk filled up during {what}.", where=folder, fix="free some space and run again"
        ) from error


def remove(path: Path) -> None:
    """Delete a folder that may not be there."""
    if path.exists():
        shutil.rmtree(path)


def cache_folder() -> Path:
    """Where downloads are kept: $D2SD_CACHE, or ~/.cache/d2sd."""
    return Path(os.environ.get("D2SD_CACHE") or Path.home() / ".cache" / "d2sd")
