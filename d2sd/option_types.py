"""Types of command-line options: what is wrong is refused, by the option's name, before anything is loaded."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, get_args

import click

from d2sd.recipe import Method as MethodName


class _FilePath(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except ValueError:  # a NUL, or a character that the system's encoding does not have
            self.fail("Not a possible file name.", param, ctx)


class RealRange(click.FloatRange):
    """A range without NaN, which passes every comparison with its bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is not a number.", param, ctx)
        return number


class _Text(click.ParamType[str]):
    """A text that matches a pattern, which is for ASCII, and has no control characters or bytes that are not text."""

    name = "text"

    def __init__(self, what: str, pattern: str = r"[\s\S]*") -> None:
        """`what` completes the message "Not ..."."""
        self._what, self._pattern = what, re.compile(pattern, re.ASCII)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not self._pattern.fullmatch(value) or not value.isprintable():
            self.fail(f"Not {self._what}.", param, ctx)  # without the value: it may be a key
        return value


#: Of an option that other users of the machine can read.
KEY_HELP = "Key of a client; repeatable. Better in D2SD_API_KEY: `ps` shows options to every user."

FilePath = _FilePath(path_type=Path)
#: A duration of up to a year.
Seconds = RealRange(0, 366 * 86400, min_open=True)
Name = _Text("a printable name")
Host = _Text("an address or the name of a host", r"[\w.:%-]+")
Key = _Text("a key: it is empty, or has spaces or other than ASCII characters", r"[!-~]+")
Origin = _Text("an origin: SCHEME://HOST, SCHEME://HOST:PORT or *", r"\*|https?://[\w.:\[\]-]+")


def not_empty(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse an empty environment variable, which Click takes for an unset one: a server without keys is open."""
    if not value and parameter.envvar in os.environ:
        message = f"{parameter.envvar} is empty; unset it to serve without keys."
        raise click.BadParameter(message, context, parameter)
    return value


class Listed(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of Click only
    """Values separated by commas, each of one type."""

    name = "list"

    def __init__(self, item_type: Any) -> None:
        self.item_type = click.types.convert_type(item_type)

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Convert every value."""
        if isinstance(value, list):
            return value
        return [self.item_type.convert(part.strip(), param, ctx) for part in str(value).split(",")]


PolicyType = click.Choice(get_args(MethodName))


class Method(click.ParamType):  # type: ignore[type-arg]
    """A policy, with +lookup or without, or policy:rows."""

    name = "policy[+lookup][:rows]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raise a usage error unless the value is a policy or policy:rows."""
        method, colon, rows = str(value).partition(":")
        method = PolicyType.convert(method, param, ctx)
        if colon and not (re.fullmatch("[0-9]{1,4}", rows) and 2 <= int(rows) <= 4096):
            self.fail(f"the rows of {str(value)[:80]!r} must be an integer from 2 to 4096, as in chain:16", param, ctx)
        return f"{method}{colon}{rows}"
