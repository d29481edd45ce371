"""Lanes with an environment of their own: what their tests import to be collected is installed there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", " ")
#: Folders and files of tests, and a line of the recipe that installs d2sd and what tests need.
LANES = {
    "triton-test": (r"python -m pytest .*?(tests/\S.*)", r"pip install .*(--editable.*nvidia-pytriton.*)"),
    "dynamo-test": (r"DYNAMO_TESTS := .*?(tests/\S.*)", r"DYNAMO_PIP\) .*(--editable.*hypothesis.*)"),
}


def lane(name: str) -> tuple[list[Path], list[str]]:
    """The tests of a lane, and the requirements that its recipe names."""
    tests, installs = (re.search(pattern, MAKEFILE) for pattern in LANES[name])
    assert tests
    assert installs
    named = [word for word in shlex.split(installs[1]) if not word.startswith("--")]
    return [ROOT / path for path in tests[1].split()], [word.replace(".[", "d2sd[") for word in named]


def installed(requirements: list[str]) -> set[str]:
    """The distributions that these requirements install, as far as this environment knows them."""
    found, queue = set[str](), [Requirement(one) for one in requirements]
    seen = set[tuple[str, str]]()
    while queue:
        one = queue.pop()
        name = canonicalize_name(one.name)
        found.add(name)
        for extra in ["", *one.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                below = [Requirement(text) for text in requires(name) or ()]
            except PackageNotFoundError:
                break
            queue += [r for r in below if r.marker is None or r.marker.evaluate({"extra": extra})]
    return found


def top_level(tree: ast.Module) -> Iterator[str]:
    """Names that a module imports when it is imported; those for type checkers are left out."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(top_level(ast.parse(path.read_text())))


def collected(tests: list[Path]) -> dict[str, Path]:
    """Top-level packages that collecting the tests imports, with a file that does so."""
    queue = [file for path in tests for file in (path.rglob("*.py") if path.is_dir() else [path])]
    queue += [
        conftest
        for path in tests
        for folder in [path, *path.parents][: len(path.relative_to(ROOT).parts)]
        if (conftest := folder / "conftest.py").exists()
    ]
    found, seen = dict[str, Path](), set[Path]()
    while queue:
        file = queue.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in imports(file):
            parts = name.split(".")
            if parts[0] not in ("tests", "benchmarks"):
                found.setdefault(parts[0], file)
                continue
            ends = (ROOT.joinpath(*parts[:end]).with_suffix(".py") for end in range(len(parts), 0, -1))
            queue += [path for path in ends if path.exists()][:1]
    return found


@pytest.mark.parametrize("name", LANES)
def test_a_lane_imports_what_it_installs(name: str) -> None:
    """Modules that this environment lacks as well, such as Triton's client, are the lane's own."""
    tests, requirements = lane(name)
    there, distributions = installed(requirements), packages_distributions()
    missing = {
        module: str(file.relative_to(ROOT))
        for module, file in collected(tests).items()
        if module in distributions and not there & set(map(canonicalize_name, distributions[module]))
    }
    assert not missing
