"""The builder there is: TensorRT-RTX from PyPI, which needs no GPU to build, or classic TensorRT. One surface for both.

TensorRT-RTX engines are of compute capabilities, or of all that it knows ("portable"), and finished on the machine that
runs them. Classic engines are of the GPU that builds them ("native").
"""

from __future__ import annotations

import ctypes.util
import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from d2sd.errors import BuildError

Builder = Literal["tensorrt-rtx", "tensorrt"]
_MODULES: dict[Builder, str] = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
#: What a recipe calls them -> TensorRT-RTX's own names; PORTABLE is to say nothing.
COMPUTE = {"sm75": "SM75", "sm80": "SM80", "sm86": "SM86", "sm89": "SM89", "sm120": "SM120", "sm121": "SM121"}
PORTABLE, NATIVE = "portable", "native"


@dataclass(frozen=True, slots=True)
class TensorRT:
    """A builder's module."""

    name: Builder
    module: Any
    version: str

    @property
    def targets(self) -> tuple[str, ...]:
        """What engines can be built for."""
        return (*COMPUTE, PORTABLE) if self.name == "tensorrt-rtx" else (NATIVE,)


def find_builder(name: Builder) -> TensorRT:
    """Import a builder. Raises `BuildError` saying what to install."""
    if find_spec(_MODULES[name]) is None:
        fix = "pip install 'd2sd[engines]'" if name == "tensorrt-rtx" else "install TensorRT 10.14 or later"
        raise BuildError(f"Engines are built with {name}, which is not installed.", where="engines", fix=fix)
    module = importlib.import_module(_MODULES[name])
    return TensorRT(name, module, str(module.__version__))


def unversioned_library(name: Builder, folder: Path) -> Path | None:
    """Give TensorRT-RTX's library the name that its parser asks for when it meets a plugin, in a folder of ours.

    The wheel carries libtensorrt_rtx.so.1 alone, and the parser opens libtensorrt_rtx.so. Returns what belongs on
    LD_LIBRARY_PATH, which is read when a process starts.
    """
    if name != "tensorrt-rtx" or ctypes.util.find_library("tensorrt_rtx"):
        return None
    libraries = importlib.import_module("tensorrt_rtx_libs")
    (real,) = sorted(Path(str(libraries.__file__)).parent.glob("libtensorrt_rtx.so.*"))[:1]
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libtensorrt_rtx.so"
    link.unlink(missing_ok=True)
    link.symlink_to(real)
    return folder
