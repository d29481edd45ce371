"""Compares the installed TensorRT-LLM with the contract: one row per dependency."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from d2sd.integrations.trtllm.contract import COMMITS, NEEDS, VERSIONS, Need


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


def lines(rows: list[Row]) -> Iterator[str]:
    """The table, the sources that were read, and the verdict; nothing without rows."""
    for row in rows:
        yield f"{'ok' if row.good else 'NO':4}{row.need}: {row.found}"
        if not row.good:
            yield f"    expected: {row.expected}"
    if rows:
        yield from (f"    read: {module} at {commit}" for module, commit in COMMITS.items())
        found = failures(rows)
        yield f"d2sd's tree: {'no: ' + '; '.join(found) if found else 'would be registered, not yet run on a GPU'}"


def _version(version: str) -> Row:
    try:
        good = SpecifierSet(VERSIONS, prereleases=True).contains(Version(version))
    except InvalidVersion:
        good = False
    return Row("tensorrt_llm", VERSIONS, version if good else f"{version}, a version whose sources were not read", good)


def _row(need: Need) -> Row:
    if need.parameters is not None:
        expected = f"({need.parameters})"
    elif need.fields:
        expected = f"fields {', '.join(need.fields)}"
    else:
        expected = f"is {need.same_as[1]} of {need.same_as[0].rsplit('.', 1)[-1]}" if need.same_as else "is there"
    try:
        complaint = _complaint(need, _resolve(_existing(need.modules), need.name))
    except Exception as error:  # import errors of any kind, missing attributes, objects without a signature
        complaint = _brief(error)
    return Row(need.label, expected, complaint or "as read", not complaint)


def _complaint(need: Need, value: Any) -> str:
    """The mismatch of an object that exists; empty if it matches."""
    if need.parameters is not None:
        parameters = ", ".join(inspect.signature(value).parameters)
        if parameters != need.parameters:
            return f"({parameters})"
    if missing := sorted(set(need.fields) - _fields(value)):
        return f"no field {', '.join(missing)}"
    if need.mentions:
        text = inspect.getsource(value)
        missing = [word for word in need.mentions if word not in text]
        if missing:
            return f"no longer mentions {', '.join(missing)}"
    if need.same_as is not None and value is not _resolve(*need.same_as):
        return "another object"
    return ""


def _fields(value: Any) -> set[str]:
    if dataclasses.is_dataclass(value):
        return {field.name for field in dataclasses.fields(value)}
    return set(getattr(value, "model_fields", ()))


def _existing(modules: tuple[str, ...]) -> str:
    """The first of the modules that can be found, or the last."""
    for module in modules[:-1]:
        try:
            if find_spec(module) is not None:
                return module
        except ImportError:  # of a parent
            continue
    return modules[-1]


def _resolve(module: str, name: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _brief(error: Exception) -> str:
    """One line of an exception."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
