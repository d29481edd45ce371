"""Compiles guard.cpp with the compiler of the CPU kernels, and loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from d2sd.plugins.cpu import compiler

SOURCE = Path(__file__).with_name("guard.cpp")


def build(folder: Path) -> None:
    """guard.so in this folder, in five seconds; or `failed`, with the reason."""
    command = compiler.compiler()
    if command is None:
        (folder / "failed").write_text("no C compiler")
        return
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-shared", "-fPIC", "-std=c++20", abi, *includes]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-lstdc++"]
    done = subprocess.run(
        [*command, *flags, str(SOURCE), "-o", str(folder / "guard.so"), *libraries],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        (folder / "failed").write_text(done.stderr[-300:])


def run_tests(folder: Path, *arguments: str) -> None:
    """Run tests in a process of its own: the device guard that they load stays loaded."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=SOURCE.parents[2],
        env=os.environ | {"D2SD_CUDA_GUARD": str(folder)},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    if " passed" not in done.stdout:
        pytest.skip(done.stdout[-500:])


def load(folder: Path) -> None:
    """Skips the test where the guard could not be built or loaded."""
    if torch.cuda.is_available():
        pytest.skip("this PyTorch has a device guard of its own, and tensors on CUDA are real")
    if (failed := folder / "failed").exists():
        pytest.skip(f"tools/cuda/guard.cpp does not compile: {failed.read_text()}")
    try:
        torch.ops.load_library(str(folder / "guard.so"))  # type: ignore[no-untyped-call]
    except OSError as error:
        pytest.skip(f"tools/cuda/guard.cpp does not load: {error}")
