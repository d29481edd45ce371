"""Optional dependencies: the extras of d2sd, imported where they are used."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

from packaging.requirements import Requirement

from d2sd.errors import D2SDError


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
