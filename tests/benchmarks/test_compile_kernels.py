"""A small part of `make kernels`: kernels become machine code without a GPU, within the bounds they are held to."""

from __future__ import annotations

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_kernels.py"


def test_kernels_compile_within_bounds() -> None:
    """The smallest tile, in FP8, for Hopper: two conversions, both loops and a partial result."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.compile_kernels",
        "--only",
        "bf16/fp8 D=64 tile=16 split",
        "--capability",
        "90",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 compiled, 0 exceed a bound" in done.stdout


def test_nothing_compiled_is_no_success() -> None:
    assert runpy.run_path(str(SCRIPT))["main"](["--only", "no such kernel"]) == 1


def test_bounds_are_bounds() -> None:
    script: dict[str, Any] = runpy.run_path(str(SCRIPT))
    broken, most = script["broken"], script["MOST_SHARED"]
    good = script["Compiled"]("kernel", "", b"", 9, 7, shared=most, scratch=0, registers=255, spilled=0)
    assert broken(good, 90) == []
    for fault in ({"shared": most + 1}, {"spilled": 20}, {"scratch": 8}, {"parameters": 8}):
        assert len(broken(replace(good, **fault), 90)) == 1
    assert broken(replace(good, shared=most + 32), 100) == []
    few = replace(good, registers=script["CHOSEN"], spilled=script["MOST_SPILLED"])
    assert broken(few, 90) == []
    assert broken(replace(few, spilled=few.spilled + 4), 90)


def test_the_table_of_block_sizes_is_covered() -> None:
    """Every head size and type, with and without splits, on every architecture that has the type."""
    names = {variant.name for variant in runpy.run_path(str(SCRIPT))["variants"]()}
    for kind in ("bf16", "bf16/fp8", "fp16", "fp32"):
        for size in (64, 96, 128, 256):
            found = [name for name in names if name.startswith(f"attention {kind} D={size} ")]
            assert any(name.endswith("split") for name in found)
            assert any(not name.endswith("split") for name in found)
