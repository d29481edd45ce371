"""Mutants, and the tests that can kill one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """Arguments of pytest, and what its process needs in its environment."""

    arguments: tuple[str, ...]
    interpreted: bool = False  # kernels run in Triton's interpreter
    on_device: bool = False  # on tensors of `cuda:0`, which need tools/cuda/guard.py


@dataclass(frozen=True)
class Mutant:
    """A change of one place in the source, which the proof must notice.

    `survives` says why nothing can: the program does the same.
    """

    name: str
    file: str
    old: str
    new: str
    proof: Proof
    survives: str = ""

    def apply(self, source: str) -> str:
        """The file with the change. Raises ValueError if the old text is not there exactly once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {count} places with this text:\n{self.old}")
        return source.replace(self.old, self.new)


def run(*files: str, marks: str = "not slow", k: str = "") -> Proof:
    """The tests of these files."""
    return Proof((*files, "-m", marks, *(("-k", k) if k else ())))


def interpreted(*names: str, marks: str = "not slow", k: str = "") -> Proof:
    """The checks of tests/plugins/kernels/, in Triton's interpreter."""
    files = (f"tests/plugins/kernels/{name}.py" for name in names)
    return Proof(run(*files, marks=marks, k=k).arguments, interpreted=True)
