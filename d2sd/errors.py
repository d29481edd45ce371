"""The `D2SDError` family: errors that a user can cause. The CLI prints their message and exits with code 2.

A message states what is wrong, where (file and key), what was found, what was expected, and how to fix it.
"""

from __future__ import annotations

import reprlib
from pathlib import Path

#: Longest `found` in characters, so that a damaged file does not flood the terminal.
_FOUND = 200
#: Longest of the other lines in characters; a path may be long.
_LINE = 4000


class D2SDError(Exception):
    """A fault in the user's input or environment; faults in d2sd's own logic are asserts."""

    def __init__(
        self,
        what: str,
        *,
        where: str | Path | None = None,
        found: object | None = None,
        expected: object | None = None,
        fix: str | None = None,
    ) -> None:
        """`what` is one sentence; the rest become labelled lines under it, in this order. Long values are cut."""
        self.what, self.where, self.found, self.expected, self.fix = what, where, found, expected, fix
        labelled = {
            "where": where if where is None else shortened(str(where), _LINE),
            "found": found if found is None else shortened(found),
            "expected": expected if expected is None else shortened(expected, _LINE),
            "fix": fix,
        }
        lines = [f"  {label}: {text}" for label, text in labelled.items() if text is not None]
        super().__init__("\n".join([shortened(what, _LINE), *lines]))


def shortened(value: object, most: int = _FOUND) -> str:
    """Show a value in at most `most` characters, with the middle left out. Safe and fast for any size of value."""
    if isinstance(value, (str, Path, BaseException)):
        text = str(value)
    elif isinstance(value, (dict, list, tuple, set, frozenset)):
        text = _BOUNDED.repr(value)
    else:
        try:
            text = str(value)
        except ValueError:  # an integer of more digits than Python prints
            text = "an integer of very many digits"
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … {text[-(most - most // 2 - 3) :]}"


_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel = 4
_BOUNDED.maxdict = _BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxset = _BOUNDED.maxfrozenset = 12
_BOUNDED.maxstring = _BOUNDED.maxother = _BOUNDED.maxlong = 80


class RecipeError(D2SDError):
    """The recipe, or a `--set` override, is invalid."""


class CheckpointError(D2SDError):
    """A target or drafter checkpoint is missing, damaged, or does not fit."""


class BundleError(D2SDError):
    """A bundle is missing, damaged, or of another schema."""


class BuildError(D2SDError):
    """A build stage cannot finish: download, disk space, a failed check."""


class RankLost(D2SDError):
    """A process of a model that several processes run together has ended, and the model with it."""


class RequestError(D2SDError):
    """A generation request asks for something outside the engine's limits."""


class GenerationError(D2SDError):
    """A request failed while it ran: its grammar or its text could not be processed."""

    @staticmethod
    def of(error: Exception) -> D2SDError:
        """The error itself if it is a D2SDError, else an UnexpectedError that names it."""
        if isinstance(error, D2SDError):
            return error
        return UnexpectedError("The request failed while it ran.", found=f"{type(error).__name__}: {error}")


class UnexpectedError(GenerationError):
    """A request failed by a fault that is not its own."""
