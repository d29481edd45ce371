"""The staircase and the top level of docs' layer table, held by a test: drift shows in the change that causes it.

A room imports what lies on the steps below it. `viz` is a leaf: it draws what others measured, so it imports the
foundation alone, and types of the runtime.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

ROOT = Path(__file__).parents[1]
#: The foundation: the single files of d2sd/.
FOUNDATION = tuple(sorted(path.stem for path in (ROOT / "d2sd").glob("*.py") if path.stem != "__init__"))
STEPS: tuple[tuple[str, ...], ...] = (
    FOUNDATION,
    ("plugins",),
    ("modeling",),
    ("runtime",),
    ("convert",),
    ("bundle",),
    ("build",),
    ("train", "serve", "bench", "integrations"),
    ("cli",),
)
#: Allowed within a step.
ROOMS = (*chain(*STEPS[1:]), "viz")
#: d2sd/NAME is a link to NAME.
TOP_ROOMS = ("plugins", "modeling", "runtime", "convert", "train")
#: What decides who runs where and what the foundation states: tested in milliseconds, readable without knowing torch.
PURE = (*FOUNDATION, "runtime.scheduler", "runtime.pages", "runtime.sequence")
HEAVY = {"torch", "numpy", "triton", "tensorrt", "tensorrt_rtx", "transformers"}
#: What no wheel has.
DEVELOPMENT = ("tools", "tests", "benchmarks")
TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CITATION.cff",
    "Makefile",
    "mkdocs.yml",
    "zensical.toml",
    "d2sd",
    *TOP_ROOMS,
    "recipes",
    "models",
    *DEVELOPMENT,
    "docs",
    "examples",
    "constraints",
    "deploy",
}


class Import(NamedTuple):
    """Absolute name of what a file imports; `typing` where it does so under TYPE_CHECKING alone."""

    name: str
    typing: bool


@cache
def files() -> dict[str, Path]:
    """Every module of the package, by dotted name behind `d2sd.`; a package is named as its folder."""
    found = {path.stem: path for path in (ROOT / "d2sd").glob("*.py") if path.stem != "__init__"}
    for room in ROOMS:
        folder = ROOT / room if room in TOP_ROOMS else ROOT / "d2sd" / room
        for path in folder.rglob("*.py"):
            parts = (room, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> tuple[Import, ...]:
    return imports_of(files()[module])


def imports_of(path: Path) -> tuple[Import, ...]:
    """List what a file imports, inside functions and under TYPE_CHECKING too."""
    tree = ast.parse(path.read_text("utf-8"))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for line in node.body
        for inner in ast.walk(line)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, id(node) in guarded) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its layer"
            found += [Import(f"{node.module}.{alias.name}", id(node) in guarded) for alias in node.names]
    return tuple(found)


def own_imports(module: str) -> Iterator[tuple[str, bool]]:
    """Modules of d2sd that a module imports: of `d2sd.a.b.name`, the longest part that is a module."""
    for name, typing in imports(module):
        parts = name.split(".")
        if parts[0] == "d2sd":
            candidates = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
            if imported := next((candidate for candidate in candidates if candidate in files()), None):
                yield imported, typing


def room_of(module: str) -> str:
    return module.split(".")[0]


def allowed(room: str) -> set[str]:
    """Rooms that a room may import, itself included."""
    if room == "viz":
        return {"viz", *FOUNDATION}
    below = next(STEPS[:number] for number, step in enumerate(STEPS) if room in step)
    drawn = {"viz"} if room in ("train", "serve", "bench", "cli") else set()
    same_step = set(FOUNDATION) if room in FOUNDATION else set()
    return {room, *chain(*below), *same_step, *drawn}


@pytest.mark.parametrize("room", [*FOUNDATION, *ROOMS])
def test_layers_import_downwards(room: str) -> None:
    wrong = []
    for module in files():
        if room_of(module) != room:
            continue
        for imported, typing in own_imports(module):
            fine = allowed(room) | ({"runtime"} if room == "viz" and typing else set())
            if room_of(imported) not in fine:
                wrong.append(f"{module} imports {imported}")
        wrong += [f"{module} imports the unmapped folder {i.name}" for i in imports(module) if room_of(i.name) in ROOMS]
    assert not wrong


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "plugins"])
def test_layers_above_the_ops_import_no_launcher(room: str) -> None:
    """Callers use the op, which chooses its implementation: `d2sd.plugins.dispatch.op`."""
    own = [module for module in files() if room_of(module) == room]
    names = ((module, i.name) for module in own for i in imports(module))
    launchers = [pair for pair in names if pair[1].startswith("d2sd.plugins.") and "triton" in pair[1].split(".")]
    assert not launchers


def test_no_circle_of_files_in_the_product() -> None:
    """Imports inside functions and names for type checkers included, but for these within modeling and runtime."""

    def counts(module: str, imported: str, typing: bool) -> bool:
        tolerated = typing and room_of(module) == room_of(imported) and room_of(module) in ("modeling", "runtime")
        return imported != module and not tolerated

    graph = {m: {i for i, typing in own_imports(m) if counts(m, i, typing)} for m in files()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_runtime_has_no_import_cycle_between_its_folders() -> None:
    """Names for type checkers included. A file directly in runtime/ ties folders together, so it may import any."""
    folders = {path.name for path in (ROOT / "runtime").iterdir() if path.is_dir()}
    graph: dict[str, set[str]] = {folder: set() for folder in folders}
    for module in files():
        if room_of(module) == "runtime" and (folder := folder_of(module)) in folders:
            graph[folder] |= {folder_of(imported) for imported, _ in own_imports(module)} & (folders - {folder})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def folder_of(module: str) -> str:
    """`grammar` of `runtime.grammar.step`; empty outside runtime."""
    return module.split(".")[1] if module.startswith("runtime.") else ""


def test_layers_hold_every_file_of_the_package() -> None:
    known = {*files().values(), ROOT / "d2sd" / "__init__.py"}
    assert {path for path in (ROOT / "d2sd").rglob("*.py") if path.is_file()} <= known
    assert {room_of(module) for module in files()} == {*FOUNDATION, *ROOMS}


@pytest.mark.parametrize("module", PURE)
def test_layers_pure_modules_need_no_torch(module: str) -> None:
    queue, seen = [module], set[str]()
    while queue:
        one = queue.pop()
        seen.add(one)
        for imported in imports(one):
            assert room_of(imported.name) not in HEAVY, f"{one} imports {imported.name}"
        queue += {imported for imported, _ in own_imports(one)} - seen


@pytest.mark.slow
def test_tools_are_above_the_package_and_below_tests() -> None:
    """The product needs none of them. The executor of PTX knows nothing of the product."""
    assert not [module for module in files() for i in imports(module) if room_of(i.name) in DEVELOPMENT]
    tools = {path: imports_of(path) for path in (ROOT / "tools").rglob("*.py")}
    assert not [path for path, found in tools.items() for i in found if room_of(i.name) in ("tests", "benchmarks")]
    executor = [i.name for path, found in tools.items() if "ptxsim" in path.parts for i in found]
    assert not [name for name in executor if room_of(name) == "d2sd"]
    assert not [name for name in executor if name.startswith("tools.") and not name.startswith("tools.ptxsim")]


def test_layers_top_level_is_what_the_layout_says() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {name.split("/")[0] for name in listed.stdout.split()}
    assert {name for name in found if not name.startswith(".")} <= TOP_LEVEL
    assert {"convert", "plugins", "runtime", "recipes", "tests"} <= found


# --- Sizes ----------------------------------------------------------------------------------------------------------


def lines_of(module: str) -> int:
    return len(files()[module].read_text("utf-8").splitlines())


def function_lines(module: str, name: str) -> list[int]:
    """Lines of every function of this name in a module, signature and docstring included."""
    tree = ast.parse(files()[module].read_text("utf-8"))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
    return [(node.end_lineno or 0) - node.lineno + 1 for node in found]


def test_functions_have_eight_parameters_at_most_and_classes_twenty_methods() -> None:
    """But for ops, kernels and commands, whose parameters are written by name where they are called."""
    wide = {}
    for module, path in files().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                size, most = sum(isinstance(part, FUNCTIONS) for part in node.body), 20
            elif isinstance(node, FUNCTIONS) and room_of(module) != "plugins" and not is_command_or_kernel(node):
                size, most = parameters_of(node), 8
            else:
                continue
            if size > most:
                wide[f"{module}.{node.name}"] = size
    assert not wide


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_command_or_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one).startswith(("click.command", "triton.jit")) for one in node.decorator_list)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters without `self`."""
    own = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in own if name not in ("self", "cls")]) + bool(node.args.vararg) + bool(node.args.kwarg)


def test_cli_holds_options_and_tables_only() -> None:
    assert sum(lines_of(module) for module in files() if room_of(module) == "cli") < 1050


def test_engine_is_one_class_in_one_file() -> None:
    """A base class that splits it hides half of a step."""
    (engine,) = (n for n in ast.walk(ast.parse(files()["runtime.engine"].read_text("utf-8"))) if is_class(n, "Engine"))
    assert engine.bases == []
    assert lines_of("runtime.engine") <= 400


def is_class(node: ast.AST, name: str) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and node.name == name


def test_engine_step_fits_one_screen() -> None:
    (lines,), (advance,) = (function_lines("runtime.engine", name) for name in ("step", "_advance"))
    assert lines + advance <= 45


def test_decode_step_fits_one_screen_and_is_the_only_one() -> None:
    (lines,) = (size for module in files() for size in function_lines(module, "decode_step"))
    assert lines <= 45
