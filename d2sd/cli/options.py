"""Options and arguments that several commands share."""

from __future__ import annotations

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
prefix_cache_option = click.option(
    "--prefix-cache/--no-prefix-cache", default=None, help="Reuse K/V of shared prefixes.  [default: the bundle's]"
)
held_out_option = click.option(
    "--prompts", type=FilePath, multiple=True,
    help="JSONL of {id, turns}; repeatable. Held out: neither trained on nor evaluated.  [default: our own two dozen]",
)  # fmt: skip
