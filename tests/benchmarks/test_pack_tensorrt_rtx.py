"""What the pack script decides without packing: sizes of parts, and how parts are put together again."""

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
        ["sh", str(SCRIPT), *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHON": sys.executable} | environment,
    )  # fmt: skip


def sized(folder: Path, sizes: dict[str, int]) -> None:
    (folder / "all").mkdir()
    for name, size in sizes.items():
        with (folder / "all" / name).open("wb") as file:
            file.truncate(size)  # a hole: it takes no space


def test_no_part_exceeds_its_room(tmp_path: Path) -> None:
    sized(tmp_path, {"a": 25_000_000, "b": 1_000_000, "c": 25_000_000, "d": 237_323})
    assert run("parts", "26237323", OUT=str(tmp_path)).returncode == 0
    found = [sorted(file.name for file in (tmp_path / part).iterdir()) for part in ("1", "2")]
    assert found == [["a"], ["b", "c", "d"]]  # the second one is filled to the last byte
    assert not (tmp_path / "3").exists()
    assert not (tmp_path / "all").exists()


def test_a_file_larger_than_a_part_is_refused(tmp_path: Path) -> None:
    sized(tmp_path, {"a": 101})
    done = run("parts", "100", OUT=str(tmp_path))
    assert done.returncode == 1
    assert "has 101 bytes, a part takes 100" in done.stderr


def test_room_is_what_the_checkout_leaves_of_64_mib() -> None:
    """2 MiB are kept back. A checkout of nothing holds the whole pack of 63,620,168 bytes, one of 59 MiB nothing."""
    assert run("room", HELD="0").stdout == f"{62 * 2**20}\n"
    assert run("room", HELD="38636188").stdout == f"{64 * 2**20 - 2 * 2**20 - 38636188}\n"
    done = run("room", HELD=str(59 * 2**20))
    assert done.returncode == 1
    assert "too few" in done.stderr


def test_parts_are_put_together_once(tmp_path: Path) -> None:
    """From two parts of a library, in any order of taking; the bytes are the library's."""
    library = os.urandom(5000)
    packed = lzma.compress(library, filters=[{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9}])
    parts = tmp_path / "1", tmp_path / "2"
    for part in parts:
        part.mkdir()
    (parts[0] / "rtx.xz.aa").write_bytes(packed[:3000])
    (parts[1] / "rtx.xz.ab").write_bytes(packed[3000:])
    for name in ("parser", "bindings"):
        (parts[1] / f"{name}.xz").write_bytes(lzma.compress(name.encode()))
    rest = tmp_path / "rest"
    for name in (
        "engines/portable.engine",
        "site/tensorrt_rtx_libs/__init__.py",
        "site/tensorrt_rtx_bindings/__init__.py",
    ):
        (rest / name).parent.mkdir(parents=True)
        (rest / name).write_text(name)
    with tarfile.open(parts[0] / "rest.tar", "w") as tar:
        tar.add(rest, arcname=".")
    with zipfile.ZipFile(parts[0] / "tool-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tool/__init__.py", "x = 1")
    keep = tmp_path / "keep"
    for part in reversed(parts):
        assert run("take", str(part), KEEP=str(keep)).returncode == 0
    done = run("unpack", KEEP=str(keep))
    assert done.returncode == 0, done.stderr
    site = keep / "rtx" / "site"
    assert (site / "tensorrt_rtx_libs" / "libtensorrt_rtx.so").read_bytes() == library  # through the link
    assert (site / "tensorrt_rtx_bindings" / "tensorrt_rtx.so").read_text() == "bindings"
    assert (keep / "rtx" / "engines" / "portable.engine").exists()
    assert (site / "tool" / "__init__.py").exists()
    (site / "tensorrt_rtx_libs" / "libtensorrt_rtx.so.1").write_text("as it is")
    assert run("unpack", KEEP=str(keep)).returncode == 0
    assert (site / "tensorrt_rtx_libs" / "libtensorrt_rtx.so.1").read_text() == "as it is"
    assert run("unpack", KEEP=str(tmp_path / "nothing taken")).returncode == 0
