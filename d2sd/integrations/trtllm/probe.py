"""Compares the installed TensorRT-LLM with the contract: one row per dependency."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from d2sd.integrations.trtllm.contract import NEEDS, VERSIONS, Need


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `found` describes the mismatch, or the installed object."""

    need: str
    expected: str
    found: str
    good: bool


def probe() -> list[Row]:
    """Import what the contract names and compare; the version comes first. Never raises for a mismatch."""
    try:
        package = importlib.import_module("tensorrt_llm")
    except Exception as error:  # a broken CUDA library can raise anything
        return [Row("tensorrt_llm", VERSIONS, f"cannot be imported: {_brief(error)}", False)]
    return [_version(str(getattr(package, "__version__", "no version"))), *map(_row, NEEDS)]


def failures(rows: list[Row]) -> list[str]:
    """The mismatches, one short text each; empty if the contract is met."""
    return [f"{row.need}: {row.found}" for row in rows if not row.good]


def _version(found: str) -> Row:
    try:
        good = SpecifierSet(VERSIONS, prereleases=True).contains(Version(found))
    except InvalidVersion:
        good = False
    return Row("tensorrt_llm", VERSIONS, found if good else f"{found}, a version whose sources were not read", good)


def _row(need: Need) -> Row:
    label = f"{need.module.removeprefix('tensorrt_llm._torch.')}: {need.name}"
    if need.parameters is not None:
        expected = f"({', '.join(need.parameters)})"
    else:
        expected = f"is {need.same_as[1]} of {need.same_as[0].rsplit('.', 1)[-1]}" if need.same_as else "is there"
    try:
        complaint = _complaint(need, _resolve(need.module, need.name))
    except Exception as error:  # import errors of any kind, missing attributes, objects without a signature
        complaint = _brief(error)
    return Row(label, expected, complaint or "as read", not complaint)


def _complaint(need: Need, found: Any) -> str:
    """The mismatch of an object that exists; empty if it matches."""
    if need.parameters is not None:
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != need.parameters:
            return f"({', '.join(parameters)})"
    if need.mentions:
        text = inspect.getsource(found)
        missing = [word for word in need.mentions if word not in text]
        if missing:
            return f"no longer mentions {', '.join(missing)}"
    if need.same_as is not None and found is not _resolve(*need.same_as):
        return "another object"
    return ""


def _resolve(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _brief(error: Exception) -> str:
    """One line of an exception."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
