"""Files: what cannot be read is an error that names it, and what is written is written completely or not at all."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from d2sd.errors import BuildError, BundleError, D2SDError
from d2sd.io import (
    MARKER,
    MAX_DEPTH,
    MAX_DIGITS,
    atomic_write,
    cache_folder,
    check_writable,
    claim,
    disk_space,
    exclusive,
    open_regular,
    read_json,
    read_text,
    remove,
    sha256,
    write_text,
)

# -- reading -----------------------------------------------------------------------------------------------------------


def _loop(folder: Path) -> Path:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return folder / "a"


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _zero_link(folder: Path) -> Path:
    (folder / "link").symlink_to("/dev/zero")
    return folder / "link"


NO_FILES: dict[str, Callable[[Path], Path]] = {
    "missing": lambda folder: folder / "none",
    "folder": lambda folder: folder,
    "below a file": lambda folder: Path(__file__) / "x",
    "pipe": _fifo,
    "endless device": lambda folder: Path("/dev/zero"),
    "full device": lambda folder: Path("/dev/full"),
    "link to a device": _zero_link,
    "loop of links": _loop,
    "NUL": lambda folder: folder / "a\0b",
    "half a surrogate pair": lambda folder: folder / "\ud800",
    "long name": lambda folder: folder / ("x" * 300),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = NO_FILES[kind](tmp_path)
    with pytest.raises(OSError) as caught:  # noqa: PT011  (of any kind, but naming the file)
        open_regular(path)
    assert caught.value.filename == str(path)
    with pytest.raises(BundleError) as told:
        read_text(path, error=BundleError)
    assert told.value.where == path
    with pytest.raises(OSError):  # noqa: PT011
        sha256(path)


def test_a_file_that_is_too_large_or_not_utf8_is_refused(tmp_path: Path) -> None:
    """After its bound, and by the line of a wrong byte."""
    file = tmp_path / "a"
    file.write_bytes(b"one\ntwo\nthr\xffe")
    with pytest.raises(D2SDError, match=r"a:3\n  found: byte 0xff"):
        read_text(file)
    file.write_text("12345")
    assert read_text(file, max_bytes=5) == "12345"
    with pytest.raises(D2SDError, match="too large"):
        read_text(file, max_bytes=4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a":\n 1,}', ":2"),
        ("", ":1"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "levels deep"),
        ('{"a":' * 100_000, "levels deep"),
        ("[" * 100_000 + "]" * 100_000, "levels deep"),
        ("9" * (MAX_DIGITS + 1), "digits"),
        ("9" * 5_000, "digits"),
        ("NaN", "NaN"),
        ("[-Infinity]", "Infinity"),
        ("1e400", "not a finite number"),
        ("1" * 400 + ".0", "not a finite number"),
        (r'{"a": "\ud800"}', "surrogate"),
        (r'{"\uDC00": 1}', "surrogate"),
    ],
)
def test_json_beyond_its_bounds_is_an_error_that_names_the_file(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(BundleError, match=r"a\.json") as caught:
        read_json(file)
    assert told in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_json_within_its_bounds_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    file.write_text(rf'{{"n": {2**64 - 1}, "x": -1.5e3, "s": "\ud83d\ude00 \\ud800"}}')
    assert read_json(file) == {"n": 2**64 - 1, "x": -1500.0, "s": "😀 \\ud800"}
    file.write_text(deep)
    assert str(read_json(file)) == deep


@pytest.mark.parametrize(
    "found",
    ["x" * 10**6, list(range(10**6)), {"k": ["y" * 10**6] * 1000}, 10**5000, b"z" * 999],
    ids=["text", "list", "mapping", "integer", "bytes"],
)
def test_found_is_cut(found: object) -> None:
    assert 10 < len(str(D2SDError("what", found=found))) < 1500
    assert len(str(D2SDError("what", found="a" * 500 + "z")).splitlines()[1]) < 220


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    file, link = tmp_path / "a.svg", tmp_path / "link.svg"
    file.write_text("old")
    link.symlink_to(file)
    check_writable(link)
    assert file.read_text() == "old"
    with pytest.raises(UnicodeEncodeError):
        write_text(link, "new \ud800")
    assert file.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.svg", "link.svg"]
    write_text(link, "new ⏎")
    assert link.is_symlink()
    assert file.read_text("utf-8") == "new ⏎"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.svg", "link.svg"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_write(file) as partial:  # noqa: PT012
        partial.write_text("half")
        assert file.read_text() == "old"
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert file.read_text() == "old"


def test_what_is_written_is_flushed_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mode that any new file has."""
    seen = list[bool]()
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append((tmp_path / "a").exists()))
    write_text(tmp_path / "a", "x")
    assert seen == [False]
    (tmp_path / "b").touch()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "b").stat().st_mode)


def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe, got = _fifo(tmp_path), list[str]()
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    check_writable(pipe)
    write_text(pipe, "text")
    reader.join(5)
    assert got == ["text"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("kind", ["folder", "below a file", "loop of links", "NUL", "half a surrogate pair"])
@pytest.mark.parametrize("write", [check_writable, lambda path: write_text(path, "x")], ids=["check", "write"])
def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, kind: str, write: Callable[[Path], None]) -> None:
    path = NO_FILES[kind](tmp_path)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        write(path)
    assert caught.value.filename == str(path)


def test_an_error_of_writing_names_its_file_and_keeps_its_number(tmp_path: Path) -> None:
    """A full disk names the file that was written; an error of another file keeps that one's name."""
    with pytest.raises(OSError, match="No space") as caught:
        write_text(Path("/dev/full"), "x" * 100_000)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")
    with pytest.raises(FileNotFoundError) as caught, atomic_write(tmp_path / "a"):
        (tmp_path / "none").read_text()
    assert caught.value.filename == str(tmp_path / "none")
    assert not list(tmp_path.iterdir())


# -- folders that d2sd writes ------------------------------------------------------------------------------------------


def test_a_link_beside_the_output_is_not_written_through(tmp_path: Path) -> None:
    """Such as another user leaves in a shared folder, under the name that this process will use."""
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    beside = tmp_path / f"out.{os.getpid()}.partial"
    writes: list[Callable[[], None]] = [lambda: write_text(out, "new"), lambda: check_writable(out)]
    for write in writes:
        beside.symlink_to(victim)
        before = victim.stat().st_mtime_ns
        write()
        assert (victim.read_text(), victim.stat().st_mtime_ns) == ("precious", before)
        assert not beside.is_symlink()
    assert out.read_text() == "new"


@pytest.mark.parametrize("kind", ["file", "missing", "device", "loop"])
def test_a_lock_is_not_taken_through_a_link(tmp_path: Path, kind: str) -> None:
    lock, victim = tmp_path / "lock", tmp_path / "victim"
    if kind == "file":
        victim.write_text("precious")
    lock.symlink_to({"device": Path("/dev/zero"), "loop": lock}.get(kind, victim))
    with pytest.raises(OSError, match="symbolic link") as caught, exclusive(lock, wait=False):
        pass
    assert caught.value.filename == str(lock)
    assert victim.exists() == (kind == "file")
    assert kind != "file" or victim.read_text() == "precious"


def test_a_lock_keeps_what_is_in_its_file(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("mine")
    with exclusive(lock, wait=False), pytest.raises(BuildError, match="running"), exclusive(lock, wait=False):
        pass
    assert lock.read_text() == "mine"


def test_a_folder_is_claimed_by_one_run_only(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    for run in ("bench none", "bench tiny", "bench tiny"):  # the first wrote nothing
        claim(folder, run)
    (folder / "result.json").touch()
    claim(folder, "bench tiny")
    for other in ("bench other", "train tiny"):
        with pytest.raises(BuildError, match=r"another run(.|\n)*bench tiny(.|\n)*" + other):
            claim(folder, other)
    (folder / MARKER).write_text("{")
    with pytest.raises(BuildError, match="damaged"):
        claim(folder, "bench tiny")


def _file(folder: Path) -> None:
    folder.write_text("mine")


def _files(folder: Path) -> None:
    folder.mkdir()
    (folder / "tables.md").write_text("mine")


def _link(folder: Path) -> None:
    _files(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def _link_below(folder: Path) -> None:
    claim(folder, "run")
    _files(folder.with_name("elsewhere"))
    (folder / "deep").mkdir()
    (folder / "deep" / "a").symlink_to(folder.with_name("elsewhere"))


def _marked_by_a_link(folder: Path) -> None:
    claim(folder.with_name("elsewhere"), "run")
    folder.mkdir()
    (folder / MARKER).symlink_to(folder.with_name("elsewhere") / MARKER)


def _other_json(folder: Path) -> None:
    folder.mkdir()
    (folder / MARKER).write_text('{"mine": 1}')


def _dangling(folder: Path) -> None:
    folder.symlink_to(folder.with_name("none"))


@pytest.mark.parametrize("prepare", [_file, _files, _link, _link_below, _marked_by_a_link, _other_json, _dangling])
def test_what_others_left_in_the_place_of_a_folder_is_not_touched(
    tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    folder = tmp_path / "out"
    prepare(folder)
    before = {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob("*")}
    with pytest.raises((BuildError, FileExistsError)) as caught:
        claim(folder, "run")
    assert str(folder) in str(caught.value)
    assert {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob("*")} == before


def test_in_a_shared_folder_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(tmp_path / "out", "run")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    claim(tmp_path / "out", "run")
    tmp_path.chmod(0o1777)
    with pytest.raises(BuildError, match=f"a folder of user {user}"):
        claim(tmp_path / "out", "run")


def test_removing_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    _link(tmp_path / "link")
    remove(tmp_path / "link")
    remove(tmp_path / "link")
    assert [path.name for path in tmp_path.rglob("*")] == ["elsewhere", "tables.md"]
    remove(tmp_path / "elsewhere")
    assert not list(tmp_path.iterdir())


def test_an_error_of_writing_names_the_folder_where_it_happened(tmp_path: Path) -> None:
    for number, told in ((errno.ENOSPC, "filled up during x"), (errno.EDQUOT, "filled up during x")):
        with pytest.raises(BuildError, match=told), disk_space(tmp_path, 0, "x"):
            raise OSError(number, "full")
    with pytest.raises(OSError, match="File too large") as caught, disk_space(tmp_path, 0, "x"):
        raise OSError(errno.EFBIG, "File too large")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path))


def test_one_variable_moves_all_that_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from d2sd.bundle import step_times
    from d2sd.plugins.cpu import compiler

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("D2SD_CACHE", raising=False)
    assert cache_folder() == tmp_path / "xdg" / "d2sd"
    monkeypatch.setenv("D2SD_CACHE", str(tmp_path / "own"))
    assert cache_folder() == compiler._folder("cpu.so") == tmp_path / "own"
    assert vars(step_times)["cache_folder"] is cache_folder
