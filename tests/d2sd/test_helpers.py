"""Helper processes run what this process imports, and nothing that lies in the current folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from d2sd.helpers import python_command
from tests.test_layers import files


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(python_command(program, *arguments), capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("hostile_folder")
def test_a_module_runs_under_its_name_with_its_arguments() -> None:
    done = run("json.tool", "--indent", "1", "given.json")
    assert done.returncode == 2
    assert "given.json" in done.stderr
    assert run("pip", "--version").stdout.startswith("pip ")


@pytest.mark.usefixtures("hostile_folder")
def test_a_program_runs_by_its_path_and_imports_what_this_process_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library, of: one"
    library.mkdir()
    (library / "given.py").write_text("VALUE = 'from the library'")
    program = tmp_path / "program.py"
    program.write_text("import json, sys, d2sd, given; print(__name__, given.VALUE, sys.argv, '' in sys.path)")
    monkeypatch.setattr(sys, "path", [*sys.path, str(library)])
    done = run(str(program), "-x", "y z")
    assert done.stdout == f"__main__ from the library {[str(program), '-x', 'y z']} False\n", done.stderr


def test_a_d2sd_that_was_found_in_the_current_folder_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(__file__).parents[2]
    monkeypatch.setattr(sys, "path", ["", *(entry for entry in sys.path if Path(entry) != own)])
    assert python_command("pip")[3].split("\n")[-1] == str(own)


def test_nothing_else_starts_python() -> None:
    """Not `python -m`, nor multiprocessing and executors of processes: they search the current folder."""
    own = {module: path.read_text("utf-8") for module, path in files().items() if module != "helpers"}
    ways = ("sys.executable", "multiprocessing", "ProcessPoolExecutor", "-m pip")
    assert not [(module, way) for module, source in own.items() for way in ways if way in source]
