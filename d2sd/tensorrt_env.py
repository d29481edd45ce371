"""Locates a TensorRT build: TensorRT-RTX from PyPI, which builds without a GPU, or classic TensorRT.

TensorRT-RTX engines target compute capabilities, or all that it supports ("portable"), and are finished on the machine
that runs them. Classic engines target the GPU that builds them ("native").
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from d2sd.errors import BuildError
from d2sd.extras import install_line

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
