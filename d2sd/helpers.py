"""Processes: commands of helpers that import what this one imports, panics of libraries in Rust, Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from d2sd.errors import D2SDError

#: `python -m` searches the current folder first, where a downloaded model may have a torch.py, and its switch -P begins
#: with Python 3.11: so the path is set before anything is imported that is not built in.
_START = """
import sys
sys.path[:] = sys.argv[1].split("\\n")
del sys.argv[:2]
import runpy
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def python_command(program: str, *arguments: str) -> list[str]:
    """The command that runs a module, or the file of a path that ends in .py, with this process's path of imports."""
    own = str(Path(__file__).parents[1])  # of a d2sd that was found in the current folder, as `python -c` does
    path = [entry for entry in map(str, sys.path) if entry]
    return [interpreter(), "-c", _START, "\n".join([*path, own]), program, *arguments]


def interpreter() -> str:
    """The interpreter of this environment, in a program that embeds Python too, as Triton's does."""
    executable = Path(sys.executable or "")
    return str(executable) if executable.name.startswith("python") else str(Path(sys.prefix, "bin", "python3"))


def is_panic(error: BaseException) -> bool:
    """Whether the error is a panic."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def panics_as(kind: type[D2SDError], what: str, **labels: Any) -> Iterator[None]:
    """Raise an error of this kind, with these labels, in place of a panic in the block."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise kind(what, found=f"a panic of a library: {error}", **labels) from None


@contextmanager
def noting_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield whether Ctrl-C was pressed inside the block, where it raises KeyboardInterrupt as always.

    Libraries turn that into errors of their own, or swallow it and fail later, as an import does that finds half of
    itself imported.
    """
    came = list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    usual = usual and threading.current_thread() is threading.main_thread()
    if usual:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
