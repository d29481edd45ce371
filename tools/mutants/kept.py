"""Mutants that were as expected and are so still: nothing that their proof runs has changed.

This is pytest's plugin as well, which says what a proof runs: files of this checkout of which a function was called, or
that have none, those with kernels, and what else is in their folders, such as C sources. A constant in a file whose
functions were not called is not seen: name a mutant to run it in any case.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import threading
from dataclasses import asdict, dataclass, field
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

import torch

from tools.code_alone import code_of
from tools.mutants.mutant import Mutant, Proof

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "results" / "checks.mutants.json"
#: Where the plugin writes the names of files.
VARIABLE = "D2SD_PROOF_RUNS"


#: Code of all functions that were called.
_CALLED: set[CodeType] = set()


def _called(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        _CALLED.add(frame.f_code)


def pytest_configure() -> None:
    threading.setprofile(_called)
    sys.setprofile(_called)


def pytest_sessionfinish() -> None:
    sys.setprofile(None)
    here = Path.cwd()
    modules = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    ours = {
        file.relative_to(here) for file in map(Path.resolve, modules) if file.is_relative_to(here) and file.exists()
    }
    ours = {file for file in ours if file.suffix == ".py" and not file.parts[0].startswith(".")}  # an environment
    called = {Path(code.co_filename).resolve() for code in _CALLED if code.co_flags & CO_OPTIMIZED}  # no class bodies
    run = {file for file in ours if here / file in called or "triton" in file.parts or not _has_functions(here / file)}
    run = {file for file in run if file.parent != Path("tools/mutants")}
    folders = {file.parent for file in run} - {Path()}
    beside = {file for folder in folders for file in folder.iterdir() if file.suffix != ".py" and file.is_file()}
    Path(os.environ[VARIABLE]).write_text("\n".join(sorted(map(str, run | beside))), "utf-8")


def _has_functions(file: Path) -> bool:
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(ast.parse(file.read_text()))
    )


@dataclass
class Kept:
    """Contents of `FILE`: files by proof, and a hash by the name of a mutant."""

    files: dict[str, list[str]] = field(default_factory=dict)
    mutants: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = FILE) -> Kept:
        if not path.exists():
            return cls()
        found = json.loads(path.read_text("utf-8"))
        names = found["names"]
        return cls({proof: [names[i] for i in ids] for proof, ids in found["files"].items()}, found["mutants"])

    def write(self, path: Path = FILE) -> None:
        """Names of files once, since most are in many proofs."""
        names = sorted({name for files in self.files.values() for name in files})
        number = {name: i for i, name in enumerate(names)}
        files = {proof: [number[name] for name in files] for proof, files in sorted(self.files.items())}
        rows = (f'"{key}": {json.dumps(value)}' for key, value in files.items())
        text = ",\n".join(rows)
        mutants = json.dumps(dict(sorted(self.mutants.items())), indent=0)
        path.write_text(f'{{"names": {json.dumps(names)},\n"files": {{\n{text}}},\n"mutants": {mutants}}}\n', "utf-8")

    def key(self, mutant: Mutant) -> str | None:
        """A hash of the mutant and all that its proof runs; None before the proof has run."""
        if (files := self.files.get(title(mutant.proof))) is None:
            return None
        found = hashlib.sha256(json.dumps([asdict(mutant), torch.__version__]).encode())
        for name in sorted({mutant.file, *files}):
            file = ROOT / name
            text = code_of(file.read_bytes(), file.suffix) if file.is_file() else b"no such file"
            found.update(f"{name}\n".encode() + text)
        return found.hexdigest()[:16]

    def holds(self, mutant: Mutant) -> bool:
        return self.mutants.get(mutant.name) == self.key(mutant) is not None


def title(proof: Proof) -> str:
    """The key of a proof in the file."""
    kind = " interpreted" * proof.interpreted + " on device" * proof.on_device
    return " ".join(proof.arguments) + kind
