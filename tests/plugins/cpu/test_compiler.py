"""Which compiler is taken, what is kept of its work, and that nothing breaks without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from d2sd.plugins.cpu import compiler

RUN = "from d2sd.plugins.cpu import library; print(library.load())"


def loaded(cache: Path, command: str | None, path: str | None = None) -> str:
    """What a new process says of the library."""
    settings = {"XDG_CACHE_HOME": str(cache), "PATH": os.environ["PATH"] if path is None else path}
    if command is not None:
        settings[compiler.COMMAND] = command
    environment = {name: value for name, value in os.environ.items() if name != compiler.COMMAND} | settings
    return subprocess.run(
        [sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_no_compiler_is_told_with_its_remedy(tmp_path: Path) -> None:
    assert "d2sd[cpu]" in loaded(tmp_path, "")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_is_told(tmp_path: Path) -> None:
    said = loaded(tmp_path, "sh -c 'echo no such option >&2; exit 3' cc")
    assert "no such option" in said
    assert "sh -c" in said
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_command_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert "No closing quotation" in loaded(tmp_path, "cc '-O3")


def test_a_missing_compiler_is_told(tmp_path: Path) -> None:
    assert "nowhere-cc" in loaded(tmp_path, "nowhere-cc")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in loaded(tmp_path / "file", "cc")


@pytest.mark.skipif(compiler.compiler() is None, reason="no C compiler")
def test_a_locale_without_unicode_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton runs its models under the C locale, and Python may not switch to UTF-8 there."""
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    assert loaded(tmp_path, None).startswith("<CDLL")


@pytest.mark.skipif(compiler.compiler() is None, reason="no C compiler")
def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(command: list[str], **options: object) -> None:
        calls.append(command)
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    build = compiler.build.__wrapped__
    first = build()
    assert build() == first
    assert len(calls) == 1
    assert isinstance(first, Path)
    assert list((tmp_path / "d2sd").iterdir()) == [first]
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-DOTHER"))
    assert build() != first
