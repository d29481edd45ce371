"""The TensorRT there is: TensorRT-RTX from PyPI, which builds without a GPU, or classic TensorRT. One surface for both.

TensorRT-RTX engines are of compute capabilities, or of all that it knows ("portable"), and finished on the machine that
runs them. Classic engines are of the GPU that builds them ("native").
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from d2sd.errors import BuildError

Builder = Literal["tensorrt-rtx", "tensorrt"]
_MODULES: dict[Builder, str] = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
#: What a recipe calls them -> TensorRT-RTX's own names; PORTABLE is to say nothing.
COMPUTE = {"sm75": "SM75", "sm80": "SM80", "sm86": "SM86", "sm89": "SM89", "sm120": "SM120", "sm121": "SM121"}
#: Bytes that addresses must be multiples of, by TensorRT's documentation.
ALIGNMENT = 256
PORTABLE, NATIVE = "portable", "native"


@dataclass(frozen=True, slots=True)
class TensorRT:
    """A module that builds and runs engines."""

    name: Builder
    module: Any
    version: str

    @property
    def targets(self) -> tuple[str, ...]:
        """What engines can be built for."""
        return (*COMPUTE, PORTABLE) if self.name == "tensorrt-rtx" else (NATIVE,)


def find_tensorrt(name: Builder) -> TensorRT:
    """Import it. Raises `BuildError` saying what to install."""
    fix = "pip install 'd2sd[engines]'" if name == "tensorrt-rtx" else "install TensorRT 10.14 or later"
    if find_spec(_MODULES[name]) is None:
        raise BuildError(f"Engines need {name}, which is not installed.", where="engines", fix=fix)
    try:
        module = import_module(_MODULES[name])
    except (ImportError, OSError) as error:  # a library that it lacks, or one of another system
        raise BuildError(
            f"{name} is installed and cannot be imported.", where="engines", found=error, fix=fix
        ) from None
    return TensorRT(name, module, str(module.__version__))


class ErrorLog:
    """A logger (`log`) that keeps errors, so that they can be reported where they belong."""

    def __init__(self, module: Any) -> None:
        errors: list[str] = []

        class Log(module.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                module.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity <= module.ILogger.ERROR:
                    errors.append(message)

        self.log, self._errors = Log(), errors

    def told(self) -> str:
        """All errors since this was last asked."""
        said = "; ".join(self._errors) or "no reason given"
        self._errors.clear()
        return said
