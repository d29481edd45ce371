"""The import arrows and the top level of docs' layer table, held by a test: drift shows in the change that causes it.

cli -> {convert, runtime, train} -> modeling -> plugins; errors for all; schemas for cli and for whom they are.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: layer -> layers it may import beside itself; everyone may import d2sd.errors
ARROWS = {
    "plugins": set(),
    "modeling": {"plugins"},
    "convert": {"modeling", "plugins", "recipe", "manifest", "calibration"},
    "runtime": {"modeling", "plugins"},
    "train": {"modeling", "plugins", "train_recipe"},
    "cli": {
        "convert",
        "runtime",
        "train",
        "bench",
        "modeling",
        "plugins",
        "recipe",
        "manifest",
        "calibration",
        "train_recipe",
    },
    "bench": {"runtime"},
    "calibration": set(),
    "recipe": set(),
    "train_recipe": {"recipe"},
    "manifest": {"recipe"},
    "errors": set(),
}
INSIDE = {"cli", "bench"}  # of d2sd/, not beside it
FOLDERS = {layer: ROOT / (f"d2sd/{layer}" if layer in INSIDE else layer) for layer in ARROWS}
#: What decides who runs where: tested in milliseconds, and readable by people who know no torch.
PURE = ("scheduler", "pages", "sequence")
TOP_LEVEL = {
    "pyproject.toml", "README.md", "LICENSE", "CONTRIBUTING.md", "Makefile",
    "d2sd", "plugins", "modeling", "convert", "runtime", "train", "recipes", "models", "tests", "benchmarks", "docs",
}  # fmt: skip


def sources(layer: str) -> list[Path]:
    single = ROOT / "d2sd" / f"{layer}.py"
    return [single] if single.is_file() else sorted(FOLDERS[layer].rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its layer"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("layer", ARROWS)
def test_layers_import_downwards(layer: str) -> None:
    allowed = ARROWS[layer] | {layer, "errors"}
    for path in sources(layer):
        for name in imports(path):
            if name.startswith("d2sd."):
                assert name.split(".")[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"
            assert name.split(".")[0] not in ARROWS, f"{path.relative_to(ROOT)} imports the unmapped folder {name}"


def test_every_file_of_the_package_belongs_to_a_layer() -> None:
    known = {path for layer in ARROWS for path in sources(layer)} | {ROOT / "d2sd" / "__init__.py"}
    assert set((ROOT / "d2sd").rglob("*.py")) <= known


@pytest.mark.parametrize("name", PURE)
def test_who_runs_where_needs_no_torch(name: str) -> None:
    queue, seen = [ROOT / "runtime" / f"{name}.py"], set()
    while queue:
        path = queue.pop()
        seen.add(path)
        for imported in imports(path):
            package, *rest = imported.split(".")
            assert package not in ("torch", "numpy", "triton", "tensorrt"), f"{path} imports {imported}"
            if package == "d2sd" and rest[0] != "errors":
                assert rest[0] == "runtime", f"{path} imports {imported}"
                queue += {ROOT / "runtime" / f"{rest[1]}.py"} - seen


def test_the_top_level_is_what_the_layout_says() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {name.split("/")[0] for name in listed.stdout.split()}
    assert {name for name in found if not name.startswith(".")} == TOP_LEVEL
