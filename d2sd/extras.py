"""Optional dependencies: the extras of d2sd, imported where they are used.

Of TensorRT there are two builds: TensorRT-RTX from PyPI, which builds without a GPU, and classic TensorRT. TensorRT-RTX
engines target compute capabilities, or all that it supports ("portable"), and are finished on the machine that runs
them. Classic engines target the GPU that builds them ("native").
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import Any, Literal

from packaging.requirements import Requirement

from d2sd.errors import BuildError, D2SDError


def install_line(extra: str) -> str:
    """The command that installs an extra's packages, by their own names: no index has a package called d2sd."""
    try:
        named = [Requirement(line) for line in requires("d2sd") or ()]
    except PackageNotFoundError:  # run from a clone that is not installed
        return f"pip install '.[{extra}]' in a clone"
    needs = [need for need in named if need.marker is not None and need.marker.evaluate({"extra": extra})]
    return f"pip install {' '.join(repr(f'{need.name}{need.specifier}') for need in needs)}"


def require(extra: str, modules: tuple[str, ...], purpose: str) -> None:
    """Raise D2SDError with `install_line(extra)` if one of `modules` is not installed; nothing is imported."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise D2SDError(f"{purpose} needs {' and '.join(missing)}.", fix=install_line(extra))


def require_plots() -> None:
    """Raise D2SDError if matplotlib is not installed."""
    require("plots", ("matplotlib",), "Drawing plots")


Builder = Literal["tensorrt-rtx", "tensorrt"]
_MODULES: dict[Builder, str] = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
#: Compute capabilities as recipes name them -> TensorRT-RTX's names. For PORTABLE, none is set.
COMPUTE = {"sm75": "SM75", "sm80": "SM80", "sm86": "SM86", "sm89": "SM89", "sm120": "SM120", "sm121": "SM121"}
#: Alignment of tensor addresses in bytes, by TensorRT's documentation.
ALIGNMENT = 256
PORTABLE, NATIVE = "portable", "native"


@dataclass(frozen=True, slots=True)
class TensorRT:
    """An imported TensorRT module."""

    name: Builder
    module: Any
    version: str

    @property
    def targets(self) -> tuple[str, ...]:
        """The compute capabilities that engines can be built for."""
        return (*COMPUTE, PORTABLE) if self.name == "tensorrt-rtx" else (NATIVE,)


def find_tensorrt(name: Builder) -> TensorRT:
    """Import TensorRT. Raises `BuildError`, with the command that installs it."""
    fix = install_line("engines") if name == "tensorrt-rtx" else "install TensorRT 10.14 or later"
    if find_spec(_MODULES[name]) is None:
        raise BuildError(f"Engines need {name}, which is not installed.", where="engines", fix=fix)
    try:
        module = import_module(_MODULES[name])
    except (ImportError, OSError) as error:  # a missing shared library, or one for another system
        raise BuildError(
            f"{name} is installed and cannot be imported.", where="engines", found=error, fix=fix
        ) from None
    return TensorRT(name, module, str(module.__version__))


class ErrorLog:
    """A TensorRT logger (`log`) that collects errors for the exceptions that report them."""

    def __init__(self, module: Any) -> None:
        errors: list[str] = []

        class Log(module.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                module.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity <= module.ILogger.ERROR:
                    errors.append(message)

        self.log, self._errors = Log(), errors

    def drain(self) -> str:
        """All errors since the last call."""
        messages = "; ".join(self._errors) or "no reason given"
        self._errors.clear()
        return messages
