"""The one error family. What a user can cause raises `D2SDError`; the CLI turns it into a message and exit code 2.

A message says what is wrong, where (file and key), what was found, what was expected, and how to fix it.
"""

from __future__ import annotations

from pathlib import Path


class D2SDError(Exception):
    """A fault in the user's input or surroundings, never in our own logic (that is what asserts are for)."""

    def __init__(
        self,
        what: str,
        *,
        where: str | Path | None = None,
        found: object | None = None,
        expected: object | None = None,
        fix: str | None = None,
    ) -> None:
        """`what` is one sentence; the rest become labelled lines under it, in this order."""
        self.what, self.where, self.found, self.expected, self.fix = what, where, found, expected, fix
        labelled = {"where": where, "found": found, "expected": expected, "fix": fix}
        super().__init__("\n".join([what, *(f"  {k}: {v}" for k, v in labelled.items() if v is not None)]))


class RecipeError(D2SDError):
    """The recipe, or a `--set` override, does not say something we can build."""


class CheckpointError(D2SDError):
    """A target or drafter checkpoint is missing, damaged, or does not fit."""


class BundleError(D2SDError):
    """A bundle is missing, damaged, or of another schema."""


class BuildError(D2SDError):
    """A build stage cannot finish: download, disk space, a failed check."""


class RequestError(D2SDError):
    """A generation request asks for something outside the engine's limits."""
