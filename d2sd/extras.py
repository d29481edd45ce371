"""Optional dependencies: the extras of d2sd, imported where they are used."""

from __future__ import annotations

from importlib.util import find_spec

from d2sd.errors import D2SDError


def require(extra: str, modules: tuple[str, ...], purpose: str) -> None:
    """Raise D2SDError that names the extra if one of `modules` is not installed; nothing is imported."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise D2SDError(f"{purpose} needs {' and '.join(missing)}.", fix=f"pip install 'd2sd[{extra}]'")


def require_plots() -> None:
    """Raise D2SDError if matplotlib is not installed."""
    require("plots", ("matplotlib",), "Drawing plots")
