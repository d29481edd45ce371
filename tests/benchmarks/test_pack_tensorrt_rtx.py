"""The pack script decides, without packing, the sizes of parts and how parts are put together again."""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pack_tensorrt_rtx.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHON": sys.executable} | environment,
    )


def sized(folder: Path, sizes: dict[str, int]) -> None:
    (folder / "all").mkdir()
    for name, size in sizes.items():
        with (folder / "all" / name).open("wb") as file:
            file.truncate(size)  # a hole: it takes no space


def test_no_part_exceeds_its_room(tmp_path: Path) -> None:
    sized(tmp_path, {"a": 25_000_000, "b": 1_000_000, "c": 25_000_000, "d": 237_323})
    assert run("parts", "26237323", OUT=str(tmp_path)).returncode == 0
    found = {part.name: sorted(file.name for file in part.iterdir()) for part in tmp_path.iterdir()}
    # The second one is filled to the last byte; the list of all is beside that.
    assert found == {"1": ["a", "pack.sha256"], "2": ["b", "c", "d", "pack.sha256"]}


def make_parts(out: Path, library: bytes, engine: str, room: int) -> list[Path]:
    """Write what `pack` leaves, from small stand-ins: the library in pieces of 3000 bytes, parts of at most `room`."""
    files = out / "all"
    files.mkdir(parents=True)
    packed = lzma.compress(library, filters=[{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9}])
    for number, begin in enumerate(range(0, len(packed), 3000)):
        (files / f"rtx.xz.a{'abcd'[number]}").write_bytes(packed[begin : begin + 3000])
    for name in ("parser", "bindings"):
        (files / f"{name}.xz").write_bytes(lzma.compress(name.encode()))
    rest = out / "rest"
    for name in (f"engines/{engine}", "site/tensorrt_rtx_libs/__init__.py", "site/tensorrt_rtx_bindings/__init__.py"):
        (rest / name).parent.mkdir(parents=True)
        (rest / name).write_text(name)
    with tarfile.open(files / "rest.tar", "w") as tar:
        tar.add(rest, arcname=".")
    with zipfile.ZipFile(files / "tool-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tool/__init__.py", "x = 1")
    assert run("parts", str(room), OUT=str(out)).returncode == 0
    return sorted(out.glob("[0-9]*"))


def take(parts: list[Path], keep: Path) -> None:
    for part in parts:
        done = run("take", str(part), KEEP=str(keep))
        assert done.returncode == 0, done.stderr


def unpacked_library(keep: Path) -> bytes:
    return (keep / "rtx" / "site" / "tensorrt_rtx_libs" / "libtensorrt_rtx.so").read_bytes()  # through the link


def test_parts_are_put_together_once(tmp_path: Path) -> None:
    """From two parts, in any order of taking; the bytes are the library's."""
    library, keep = os.urandom(5000), tmp_path / "keep"
    parts = make_parts(tmp_path / "out", library, "portable.engine", 22_000)
    assert len(parts) == 2
    take(parts[::-1], keep)
    done = run("unpack", KEEP=str(keep))
    assert done.returncode == 0, done.stderr
    site = keep / "rtx" / "site"
    assert unpacked_library(keep) == library
    assert (site / "tensorrt_rtx_bindings" / "tensorrt_rtx.so").read_text() == "bindings"
    assert (keep / "rtx" / "engines" / "portable.engine").exists()
    assert (site / "tool" / "__init__.py").exists()
    (site / "tensorrt_rtx_libs" / "libtensorrt_rtx.so.1").write_text("as it is")
    assert run("unpack", KEEP=str(keep)).returncode == 0
    assert unpacked_library(keep) == b"as it is"
    assert run("unpack", KEEP=str(tmp_path / "nothing taken")).returncode == 0


def test_a_pack_replaces_the_one_before(tmp_path: Path) -> None:
    """Nothing of the old one is left, which had more pieces and another engine; half of the new one is no pack."""
    library, keep = os.urandom(5000), tmp_path / "keep"
    take(make_parts(tmp_path / "old", os.urandom(8000), "old.engine", 100_000), keep)
    assert run("unpack", KEEP=str(keep)).returncode == 0
    parts = make_parts(tmp_path / "new", library, "new.engine", 22_000)
    take(parts[:1], keep)
    done = run("unpack", KEEP=str(keep))
    assert done.returncode == 1
    assert "the pack is not whole" in done.stderr
    assert not (keep / "rtx" / "site").exists()
    assert not (keep / "rtx" / "engines").exists()
    take(parts[1:], keep)
    taken = {file.name for file in (keep / "rtx" / "taken").iterdir()}
    assert taken == {file.name for part in parts for file in part.iterdir()}
    assert run("unpack", KEEP=str(keep)).returncode == 0
    assert unpacked_library(keep) == library
    assert [file.name for file in (keep / "rtx" / "engines").iterdir()] == ["new.engine"]
