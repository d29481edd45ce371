"""Files: guarded reading, atomic writing, hashes, canonical JSON, folders of our own, locks and free disk space."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from d2sd.errors import BuildError, BundleError, D2SDError
from d2sd.progress import Progress, silent

_CHUNK = 1 << 20
#: Most bytes of a text or JSON file that is read into memory; real ones are far below.
MAX_BYTES = 64 << 20
#: Deepest nesting of JSON and YAML; real files stay below 10, and Python's own limit is 1,000 frames.
MAX_DEPTH = 64
#: Longest integer in JSON and YAML: transformers writes int(1e30), of 31 digits, for a tokenizer without a limit.
MAX_DIGITS = 40
#: Half of a pair, which stands for no character: Python joins the halves of whole ones.
SURROGATE = re.compile("[\ud800-\udfff]")
#: Names the run that a folder belongs to.
MARKER = ".d2sd-run.json"


# -- reading ----------------------------------------------------------------------------------------------------------


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes.

    Raises OSError naming `path` if it is missing, unreadable, or not a regular file: reading a pipe, a terminal or a
    device such as /dev/zero might never end.
    """
    with _naming(path):
        # O_NONBLOCK: opening a pipe without a writer would block
        stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            stream.close()
            raise OSError(errno.EINVAL, "Not a regular file")
        return stream


def read_text(
    path: Path,
    *,
    error: type[D2SDError] = D2SDError,
    what: str = "file",
    max_bytes: int = MAX_BYTES,
    fix: str | None = None,
) -> str:
    """Read a UTF-8 text file of at most `max_bytes`.

    Raises `error` naming the file, and the line if its encoding is wrong; messages call the file `what`.
    """
    try:
        with open_regular(path) as stream:
            data = stream.read(max_bytes + 1)
    except OSError as fault:
        raise error(f"The {what} cannot be read.", where=path, found=fault.strerror, fix=fix) from None
    if len(data) > max_bytes:
        raise error(f"The {what} is too large.", where=path, expected=f"at most {max_bytes:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        line = data.count(b"\n", 0, fault.start) + 1
        found = f"byte 0x{data[fault.start]:02x}, which is not UTF-8 text"
        raise error(f"The {what} is damaged.", where=f"{path}:{line}", found=found) from None


def parse_json(text: str, *, finite: bool = True) -> Any:
    """Parse JSON, refusing values that later code cannot handle.

    Raises ValueError (JSONDecodeError, with a line, where the syntax is wrong) for integers of more than `MAX_DIGITS`
    digits, nesting deeper than `MAX_DEPTH`, strings with half a surrogate pair and, if `finite`, NaN and infinities.
    """
    as_float, constant = (_finite, _finite) if finite else (float, float)
    value, deep = None, True
    with suppress(RecursionError):
        value = json.loads(text, parse_int=parse_int, parse_float=as_float, parse_constant=constant)
        deep = nesting(value, MAX_DEPTH) > MAX_DEPTH
    if deep:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    if "\\ud" in text.lower() and SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("a string holds half a surrogate pair, which is not text")
    return value


def read_json(path: Path, *, error: type[D2SDError] = BundleError, what: str = "file", finite: bool = True) -> Any:
    """Read a JSON file within bounds; see `parse_json`. Raises `error` naming the file, and the line where known."""
    text = read_text(path, error=error, what=what)
    try:
        return parse_json(text, finite=finite)
    except json.JSONDecodeError as fault:
        found = f"not JSON: {fault.msg}"
        raise error(f"The {what} is damaged.", where=f"{path}:{fault.lineno}", found=found) from None
    except ValueError as fault:
        raise error(f"The {what} is damaged.", where=path, found=fault) from None


def nesting(value: object, most: int) -> int:
    """Levels of lists and mappings in `value`, counted no further than `most` + 1."""
    depth, level = 0, [value]
    while depth <= most and (level := [item for item in level if isinstance(item, (dict, list))]):
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def parse_int(text: str) -> int:
    """Turn digits into an integer; raises ValueError beyond `MAX_DIGITS` digits."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:24]} is not a finite number")
    return value


# -- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file completely or not at all.

    Example: `with atomic_write(path) as partial: partial.write_text(text, "utf-8")`

    Yields the path of a temporary file in the same folder, which is flushed to disk and renamed to `path` when the
    block ends, and deleted if the block raises. A symbolic link is kept and points to the new contents. A pipe or a
    terminal is yielded unchanged. Raises OSError naming `path`, never the temporary file; a folder is refused.
    """
    with _naming(path):
        partial = path if _special(path) else _new_partial(path)
    try:
        yield partial
        if partial != path:
            with _naming(path):
                with partial.open("rb") as stream:
                    os.fsync(stream.fileno())
                partial.replace(path.resolve())
    except OSError as error:
        if error.filename not in (None, str(partial)):
            raise  # an error of another file, or one that names this one already
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        if partial != path:
            with suppress(OSError):  # usually renamed already
                partial.unlink()


def remove_partial(path: Path) -> None:
    """Delete what killed processes left of writing `path`; the caller holds a lock, so no process writes it now."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.[0-9]*.partial"):
        left.unlink()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text through `atomic_write`."""
    with atomic_write(path) as partial:
        partial.write_text(text, "utf-8")


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write canonical JSON through `atomic_write`."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def check_writable(path: Path) -> None:
    """Raise the OSError, naming `path`, that writing it later would raise."""
    with _naming(path):
        if not _special(path):
            _new_partial(path).unlink()


def _special(path: Path) -> bool:
    """Whether `path` is a pipe, a terminal or a device, which a rename would replace. Raises OSError for a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return path.exists() and not path.is_file()


def _new_partial(path: Path) -> Path:
    """Create an empty file in the folder of `path`, never through a link that somebody put there."""
    target = path.resolve()
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    with suppress(FileNotFoundError):
        partial.unlink()  # of a process that was killed and had this number
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    return partial


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Make every fault of `path` an OSError that names it as it was given."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    except RuntimeError as error:  # Path.resolve before Python 3.13
        if "Symlink loop" not in str(error):
            raise
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    except ValueError:  # a NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, "Not a possible file name", str(path)) from None


# -- hashes and folders -----------------------------------------------------------------------------------------------


def sha256(path: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """Hash one regular file, reporting bytes as they are read. Raises OSError naming it."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def hash_files(folder: Path, names: list[str], progress: Progress = silent) -> dict[str, str]:
    """{name: sha256} of files below `folder`."""
    with progress(f"hashing {folder.name}", sum((folder / name).stat().st_size for name in names)) as advance:
        return {name: sha256(folder / name, advance) for name in names}


def digest(value: object) -> str:
    """Hash a JSON value by its canonical text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# -- folders that d2sd writes -----------------------------------------------------------------------------------------


def claim(folder: Path, run: str) -> None:
    """Create `folder` for `run`, such as "bench smollm2-135m", or check that it is this run's own.

    A file in it names the run; an empty folder is taken. Raises `BuildError`, before anything is written, for files of
    others, the folder of another run, and links, through which a command would write or delete elsewhere.
    """
    fix = "choose another folder, or move it away"
    with _naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stranger = _stranger(folder)
    if stranger is not None:
        raise BuildError(
            "d2sd does not write into this folder: another may own it.", where=folder, found=stranger, fix=fix
        )
    marker = folder / MARKER
    # the mark alone is of a run that wrote nothing, or of another process that is claiming the folder now
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith(MARKER))
    owner = read_json(marker, error=BuildError, what="mark of the folder's run") if marker.exists() else None
    if not others and (owner is None or (isinstance(owner, dict) and owner.keys() == {"d2sd"})):
        write_json(marker, {"d2sd": run})
        return
    if owner is None:
        raise BuildError(
            "The folder holds files that this run did not write.",
            where=folder,
            found=others,
            expected="an empty folder, or this run's own",
            fix=fix,
        )
    if owner != {"d2sd": run}:
        raise BuildError(
            "The folder belongs to another run.", where=marker, found=owner, expected={"d2sd": run}, fix=fix
        )


def _stranger(folder: Path) -> str | None:
    """Describe what shows that `folder` may not be this user's own: links, or an owner in a shared folder."""
    if folder.is_symlink():
        return "a symbolic link"
    shared = folder.absolute().parent.stat().st_mode & stat.S_IWOTH  # such as /tmp
    if shared and (owner := folder.stat().st_uid) != os.geteuid():
        return f"a folder of user {owner}, in a folder that everybody writes"
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if (Path(place) / name).is_symlink():
                return f"a symbolic link: {(Path(place) / name).relative_to(folder)}"
    return None


@contextmanager
def exclusive(lock: Path, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on the file `lock`; the kernel releases it if the process is killed."""
    with _naming(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        # not through a link, and without emptying what is there
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "r+b", buffering=0):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise BuildError("Another command that writes this output is running.", where=lock.parent) from None
        yield


@contextmanager
def disk_space(folder: Path, need: int, what: str) -> Iterator[None]:
    """Raise BuildError if `folder` has fewer than `need` bytes free for `what`, or if the disk fills up meanwhile.

    Other errors of the system that name no file, as those of writing do not, name the folder.
    """
    free = shutil.disk_usage(folder).free
    if free < need:
        raise BuildError(
            f"Not enough disk space for {what}.", where=folder, found=f"{free:,} bytes free", expected=f"{need:,} bytes"
        )
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BuildError(
                f"The disk filled up during {what}.", where=folder, fix="free some space and run again"
            ) from error
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(folder)) from error


def remove(path: Path) -> None:
    """Delete a folder or a file if it exists; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- text and the machine ---------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Folder of everything that can be fetched or made again: $D2SD_CACHE, or d2sd in $XDG_CACHE_HOME or ~/.cache.

    Raises OSError if the user has no home.
    """
    if named := os.environ.get("D2SD_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "d2sd"
    except RuntimeError as error:
        raise OSError(f"{error}, set D2SD_CACHE") from None


def size_text(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


#: Control characters, which a terminal would execute.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: object) -> str:
    """Text with control characters other than tab and newline replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(text))
