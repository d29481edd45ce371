"""Options and arguments that several commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import click

from d2sd.convert.bundle.backends import BackendName, check_device
from d2sd.recipe import Policy


class _FilePath(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except ValueError:  # a NUL, or a character that the system's encoding does not have
            self.fail("Not a possible file name.", param, ctx)


FilePath = _FilePath(path_type=Path)


class _Seconds(click.FloatRange):
    """A duration of up to a year: neither infinite nor NaN, which no range excludes."""

    def __init__(self, *, min_open: bool = False) -> None:
        super().__init__(0, 366 * 86400, min_open=min_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("NaN is not a number of seconds.", param, ctx)
        return seconds


class _Name(click.ParamType[str]):
    """A name that answers and logs can show: no control characters, no bytes that are not text."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).isprintable():
            self.fail("Not a printable name.", param, ctx)
        return value


Seconds, Name = _Seconds, _Name()


def _checked(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not context.resilient_parsing:
        check_device(value)
    return value


bundle_argument = click.argument("bundle", type=FilePath)
device_option = click.option(
    "--device", default="cpu", show_default=True, callback=_checked, help="PyTorch device: cpu, cuda or cuda:N."
)
backend_option = click.option(
    "--executor", "backend", type=click.Choice(get_args(BackendName)), default="torch", show_default=True,
    help="PyTorch, or the bundle's graphs in ONNX Runtime or as TensorRT engines.",
)  # fmt: skip
policy_option = click.option(
    "--policy", type=click.Choice(get_args(Policy)), help="Tree policy.  [default: the bundle's]"
)
max_batch_option = click.option(
    "--max-batch", type=click.IntRange(1, 4096), help="Requests that decode together.  [default: the bundle's]"
)
max_waiting_option = click.option(
    "--max-waiting", type=click.IntRange(0, 10**6), default=256, show_default=True, help="Requests that may wait."
)
drain_timeout_option = click.option(
    "--drain-timeout", type=Seconds(), default=30, show_default=True, help="Seconds at shutdown."
)
prefix_cache_option = click.option(
    "--prefix-cache/--no-prefix-cache", default=None, help="Reuse K/V of shared prefixes.  [default: the bundle's]"
)
held_out_option = click.option(
    "--prompts", type=FilePath, multiple=True,
    help="JSONL of {id, turns}; repeatable. Held out: neither trained on nor evaluated.  [default: our own two dozen]",
)  # fmt: skip
