"""The pack script decides, without packing, the sizes of parts and how parts are put together again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from d2sd.plugins.dispatch import FENCED_TRITON

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_pack.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHON": sys.executable} | environment,
    )


def make_parts(pack: Path, library: bytes, engine: str, room: int) -> list[Path]:
    """The parts of what `pack` has made: a library, a link to it, a program and an engine."""
    site = pack / "tree" / "site"
    site.mkdir(parents=True)
    (site / "library.so.1").write_bytes(library)
    (site / "library.so").symlink_to("library.so.1")
    (site / "tool").write_text("#!/bin/sh\n")
    (site / "tool").chmod(0o755)
    (pack / "tree" / "engines").mkdir()
    (pack / "tree" / "engines" / engine).write_text(engine)
    stream = f"tar -C {pack}/tree -cf - . | xz --x86 --lzma2=preset=6 > {pack}/stream"
    subprocess.run(["sh", "-ec", stream], check=True)
    done = run("parts", str(pack), str(room))
    assert done.returncode == 0, done.stderr
    return sorted(pack.glob("[0-9]*"))


def take(parts: list[Path], keep: Path) -> None:
    for part in parts:
        done = run("take", f"{part}/", KEEP=str(keep))
        assert done.returncode == 0, done.stderr


def test_parts_are_put_together_once(tmp_path: Path) -> None:
    """From three parts of at most so many bytes, in any order of taking; the bytes are the library's."""
    library, keep = os.urandom(5000), tmp_path / "keep"
    parts = make_parts(tmp_path / "rtx", library, "portable.engine", 2000)
    assert len(parts) == 3
    assert [(part / f"piece.0{number}").stat().st_size for number, part in enumerate(parts[:2])] == [2000, 2000]
    take(parts[::-1], keep)
    done = run("unpack", KEEP=str(keep))
    assert done.returncode == 0, done.stderr
    unpacked = keep / "rtx" / "unpacked"
    assert (unpacked / "site" / "library.so").read_bytes() == library
    assert os.access(unpacked / "site" / "tool", os.X_OK)
    assert (unpacked / "engines" / "portable.engine").exists()
    (unpacked / "site" / "library.so.1").write_text("as it is")
    assert run("unpack", KEEP=str(keep)).returncode == 0
    assert (unpacked / "site" / "library.so").read_text() == "as it is"
    assert run("unpack", KEEP=str(tmp_path / "nothing taken")).returncode == 0


def test_a_pack_replaces_the_one_before(tmp_path: Path) -> None:
    """Nothing of the old one is left, which had more pieces and another engine; half of the new one is no pack. A pack
    of another name stays.
    """
    library, keep = os.urandom(5000), tmp_path / "keep"
    take(make_parts(tmp_path / "triton", b"other", "none", 10_000), keep)
    take(make_parts(tmp_path / "old" / "rtx", os.urandom(8000), "old.engine", 2000), keep)
    assert run("unpack", KEEP=str(keep)).returncode == 0
    parts = make_parts(tmp_path / "new" / "rtx", library, "new.engine", 4000)
    take(parts[:1], keep)
    done = run("unpack", KEEP=str(keep))
    assert done.returncode == 1
    assert "the pack rtx is not whole" in done.stderr
    assert not (keep / "rtx" / "unpacked").exists()
    take(parts[1:], keep)
    taken = {file.name for file in (keep / "rtx" / "taken").iterdir()}
    assert taken == {file.name for part in parts for file in part.iterdir()}
    assert run("unpack", KEEP=str(keep)).returncode == 0
    assert (keep / "rtx" / "unpacked" / "site" / "library.so").read_bytes() == library
    assert [file.name for file in (keep / "rtx" / "unpacked" / "engines").iterdir()] == ["new.engine"]
    assert (keep / "triton" / "unpacked" / "site" / "library.so").read_bytes() == b"other"


def test_what_is_no_part_is_refused(tmp_path: Path) -> None:
    done = run("take", str(tmp_path), KEEP=str(tmp_path / "keep"))
    assert done.returncode == 1
    assert "is no part of a pack" in done.stderr


def test_the_triton_it_packs_is_the_one_that_is_asked_for() -> None:
    assert f"TRITON={FENCED_TRITON} " in SCRIPT.read_text()


def test_unknown_words_print_the_usage() -> None:
    for words in ((), ("tritn",), ("pack", "tritn"), ("take",)):
        done = run(*words)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: sh benchmarks/gpu_pack.sh pack triton|rtx")


def test_a_cache_of_kernels_is_carried(tmp_path: Path) -> None:
    """Packed, taken and unpacked, an entry names its files where they are then, not where they were compiled."""
    pytest.importorskip("triton", reason="the extra triton is not installed")
    from benchmarks.gpu.compiled import relocate

    entry, keep = tmp_path / "cache" / "KEY", tmp_path / "keep"
    entry.mkdir(parents=True)
    (entry / "kernel.cubin").write_bytes(b"machine code")
    group = {"child_paths": {"kernel.cubin": str(entry / "kernel.cubin")}}
    (entry / "__grp__kernel.json").write_text(json.dumps(group))
    packs = tmp_path / "packs"
    done = run("pack", "compiled", COMPILED=str(tmp_path / "cache"), PACKS=str(packs), HELD="9900000")
    assert done.returncode == 0, done.stderr
    take(sorted((packs / "compiled").glob("[0-9]*")), keep)
    assert run("unpack", KEEP=str(keep)).returncode == 0
    shutil.rmtree(tmp_path / "cache")
    unpacked = keep / "compiled" / "unpacked" / "cache"
    assert relocate(unpacked) == 1
    found = json.loads((unpacked / "KEY" / "__grp__kernel.json").read_text())
    assert Path(found["child_paths"]["kernel.cubin"]).read_bytes() == b"machine code"


def test_weights_need_their_prompts(tmp_path: Path) -> None:
    """A checkout without data/eval says so before it downloads anything."""
    checkout = tmp_path / "checkout"
    for name in ("benchmarks/gpu_pack.sh", "recipes/smollm2-135m.yaml"):
        (checkout / name).parent.mkdir(parents=True)
        shutil.copy(SCRIPT.parents[1] / name, checkout / name)
    command = ["sh", str(checkout / "benchmarks" / "gpu_pack.sh"), "pack", "weights"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"HELD": "9900000"})
    assert done.returncode == 1
    assert "no prompts in data/eval" in done.stderr
