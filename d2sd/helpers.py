"""Commands of helper processes: Python programs that import what this process imports."""

from __future__ import annotations

import sys
from pathlib import Path

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
