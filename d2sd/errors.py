"""The `D2SDError` family: errors that a user can cause. The CLI prints their message and exits with code 2.

A message states what is wrong, where (file and key), what was found, what was expected, and how to fix it. A setting
that its readers call by different names is written in braces, as in "choose another {policy}"; each reader gets a word.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from copy import copy
from pathlib import Path

from typing_extensions import Self

#: The words for those who use Python, who use the command line, and who send requests to a server.
PYTHON: Mapping[str, str] = {
    "policy": "policy=",
    "executor": "backend=",
    "max_tokens": "max_tokens",
    "prompt": "prompt",
    "untemplated": "LLM.generate()",
    "or_longer": ", or raise limits.max_context in the recipe and build the bundle again",
    "or_more_pages": ", or raise limits.kv_memory in the recipe and build the bundle again",
}
CLI: Mapping[str, str] = {
    **PYTHON,
    "policy": "--policy",
    "executor": "--executor",
    "max_tokens": "--max-new-tokens",
    "untemplated": "--raw",
}
CLIENT: Mapping[str, str] = {
    **PYTHON,
    "policy": "policy",
    "untemplated": "/v1/completions",
    "or_longer": "",
    "or_more_pages": "",
}

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
        super().__init__(what)

    def __str__(self) -> str:
        return self.told(PYTHON)

    def told(self, words: Mapping[str, str]) -> str:
        """The message in the words of a reader, such as `CLI`. What was found is quoted as it is."""
        labelled = {
            "where": None if self.where is None else shortened(spelled(str(self.where), words), _LINE),
            "found": None if self.found is None else shortened(self.found),
            "expected": None if self.expected is None else shortened(self.expected, _LINE),
            "fix": None if self.fix is None else spelled(self.fix, words),
        }
        lines = [f"  {label}: {text}" for label, text in labelled.items() if text is not None]
        return "\n".join([shortened(spelled(self.what, words), _LINE), *lines])

    def at(self, where: str | Path | None) -> Self:
        """The same error at another place, without its traceback."""
        moved = copy(self)
        moved.where = where
        return moved


def spelled(text: str, words: Mapping[str, str]) -> str:
    """The text with a word for each name in braces that `words` has."""
    return re.sub(r"\{(\w+)\}", lambda name: words.get(name[1], name[0]), text)


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


class ContextLengthExceeded(RequestError):
    """The prompt, or the prompt and the answer that is asked for, are longer than the context."""


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
