"""Compilers are found, their work is kept and loaded only from this user, and nothing breaks without one."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from d2sd.plugins.cpu import compiler, library

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("", ["pip install 'ziglang>="]),
        ("sh -c 'echo no such option >&2; exit 3' cc", ["no such option", "sh -c"]),
        ("cc '-O3", ["No closing quotation"]),
        ("nowhere-cc", ["nowhere-cc"]),
    ],
)
def test_a_compiler_that_does_not_compile_is_told(command: str, told: list[str], tmp_path: Path) -> None:
    said = loaded(tmp_path, command)
    assert [part for part in told if part not in said] == []
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


@pytest.mark.slow
@pytest.mark.skipif(compiler.compiler() is None, reason="no C compiler")
def test_a_locale_without_unicode_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton runs its models under the C locale, and Python may not switch to UTF-8 there."""
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    assert loaded(tmp_path, None).startswith("<CDLL")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of a compiler that writes libraries of nothing; the cache is `tmp_path`."""
    calls = []

    def run(command: list[str], **options: object) -> None:
        calls.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"nothing")

    monkeypatch.setenv(compiler.COMMAND, "cc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_a_library_is_built_once(compiled: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's image has such a cache."""
    library = compiler.build.__wrapped__()
    monkeypatch.setattr("tempfile.TemporaryFile", None)
    assert compiler.build.__wrapped__() == library
    assert len(compiled) == 1


def built() -> Path:
    """The library, built or found."""
    library = compiler.build.__wrapped__()
    assert isinstance(library, Path), library
    return library


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _changed(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [_cut, _emptied, _changed])
def test_a_library_that_is_not_whole_is_built_again(damage: Callable[[Path], None], compiled: list[list[str]]) -> None:
    """A power cut leaves any part of a file, and loading that ends the process by SIGBUS."""
    first = built()
    whole = first.read_bytes()
    damage(first)
    assert built() == first
    assert len(compiled) == 2
    assert first.read_bytes() == whole


@pytest.mark.parametrize("bits", [0o002, 0o020, 0o022])
@pytest.mark.parametrize("of", ["file", "folder"])
def test_a_library_that_others_can_write_is_not_loaded(bits: int, of: str, compiled: list[list[str]]) -> None:
    first = built()
    changed = first if of == "file" else first.parent
    changed.chmod(changed.stat().st_mode | bits)
    again = built()
    assert len(compiled) == 2
    assert not (again.stat().st_mode | again.parent.stat().st_mode) & 0o022
    assert built() == again  # kept, in a folder of this user's own where the cache is shared
    assert len(compiled) == 2


@pytest.mark.parametrize("user", ["another", "root"])
def test_only_this_users_libraries_and_roots_are_loaded(
    user: str, compiled: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user owns everything in the cache, and the folder that is named for this one."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = built()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    monkeypatch.setattr(compiler, "_TRUSTED", {mine} if user == "root" else set())
    again = built()
    if user == "root":
        assert again == first
    else:
        assert len(compiled) == 2
        assert again.parent.name.startswith("d2sd-")


def test_a_link_in_the_cache_is_not_followed(compiled: list[list[str]], tmp_path: Path) -> None:
    first = built()
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    assert built() == first
    assert len(compiled) == 2
    assert not first.is_symlink()


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_is_built_can_be_loaded_under_every_umask(umask: int, compiled: list[list[str]]) -> None:
    before = os.umask(umask)
    try:
        first = built()
    finally:
        os.umask(before)
    assert built() == first
    assert len(compiled) == 1


def test_a_library_without_our_functions_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "build", lambda: Path(ctypes.util.find_library("m") or ""))
    assert "d2sd_" in str(library.load.__wrapped__())
