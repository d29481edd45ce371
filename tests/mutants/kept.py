"""Mutants that were as expected and are so still: nothing that their proof loads has changed.

This is pytest's plugin as well that says what a proof loads: modules of this checkout, and what else is in their
folders, such as C sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tests.mutants.mutant import Mutant, Proof

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "results" / "checks.mutants.json"
#: Where the plugin writes the names of files.
VARIABLE = "D2SD_LOADED"


def pytest_sessionfinish() -> None:
    here = Path.cwd()
    modules = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    ours = {file.relative_to(here) for file in map(Path.resolve, modules) if file.is_relative_to(here)}
    ours = {file for file in ours if not file.parts[0].startswith(".")}  # an environment
    folders = {file.parent for file in ours} - {Path()}
    beside = {file for folder in folders for file in folder.iterdir() if file.suffix != ".py"}
    names = sorted(str(file) for file in ours | beside if file.is_file())
    Path(os.environ[VARIABLE]).write_text("\n".join(names), "utf-8")


@dataclass
class Kept:
    """What is written in `FILE`: files by proof, and a hash by the name of a mutant."""

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
        """A hash of the mutant and all that its proof loads; None before the proof has run."""
        if (files := self.files.get(title(mutant.proof))) is None:
            return None
        found = hashlib.sha256(json.dumps([asdict(mutant), torch.__version__]).encode())
        for name in files:
            file = ROOT / name
            found.update(f"{name}\n".encode() + (file.read_bytes() if file.is_file() else b"no such file"))
        return found.hexdigest()[:16]

    def holds(self, mutant: Mutant) -> bool:
        return self.mutants.get(mutant.name) == self.key(mutant) is not None


def title(proof: Proof) -> str:
    """The key of a proof in the file."""
    kind = " interpreted" * proof.interpreted + " on device" * proof.on_device
    return " ".join(proof.arguments) + kind
