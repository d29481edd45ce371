"""Which compiler is taken, what is kept of its work, and that nothing breaks without one."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from d2sd.plugins.cpu import compiler

RUN = "from d2sd.plugins.cpu import library; print(library.load())"


def loaded(cache: Path, command: str | None, path: str | None = None) -> str:
    """Return what a new process says of the library."""
    settings = {"XDG_CACHE_HOME": str(cache), "PATH": os.environ["PATH"] if path is None else path}
    if command is not None:
        settings[compiler.COMMAND] = command
    environment = {name: value for name, value in os.environ.items() if name != compiler.COMMAND} | settings
    return subprocess.run(
        [sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_no_compiler_is_told_with_its_remedy(tmp_path: Path) -> None:
    assert "pip install 'ziglang>=" in loaded(tmp_path, "")
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


@pytest.mark.skipif(compiler.compiler() is None, reason="no C compiler")
def test_a_locale_without_unicode_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton runs its models under the C locale, and Python may not switch to UTF-8 there."""
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    assert loaded(tmp_path, None).startswith("<CDLL")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of a compiler that writes empty libraries."""
    calls = []

    def run(command: list[str], **options: object) -> None:
        calls.append(command)
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setenv(compiler.COMMAND, "cc")
    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_a_library_is_built_once(compiled: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build = compiler.build.__wrapped__
    first = build()
    assert build() == first
    assert len(compiled) == 1
    assert isinstance(first, Path)
    assert list((tmp_path / "d2sd").iterdir()) == [first]
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-DOTHER"))
    assert build() != first


@pytest.mark.parametrize("home", [True, False])
def test_without_a_cache_that_can_be_written_a_private_folder_is_used_until_exit(
    home: bool,
    compiled: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    at_exit: list[partial[None]] = []
    monkeypatch.setattr("atexit.register", lambda *call, **options: at_exit.append(partial(*call, **options)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if home else "")
    (tmp_path / "file").touch()
    library = compiler.build.__wrapped__()
    assert isinstance(library, Path)
    assert library.is_file()
    assert library.parent.parent == tmp_path
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert ("file" if home else "no home") in caplog.text
    (end,) = at_exit
    end()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_library_in_a_cache_that_cannot_be_written_is_used(
    compiled: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container's image."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = compiler.build.__wrapped__()
    monkeypatch.setattr("tempfile.TemporaryFile", None)
    assert compiler.build.__wrapped__() == library
    assert len(compiled) == 1
