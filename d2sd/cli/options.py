"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, get_args

import click

from d2sd.bundle.backends import BackendName, check_device
from d2sd.option_types import FilePath as FilePath  # for all commands
from d2sd.option_types import PolicyType, Seconds


def _checked(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not context.resilient_parsing:
        check_device(value)
    return value


bundle_argument = click.argument("bundle", type=FilePath)
device_option = click.option(
    "--device", default="cpu", show_default=True, callback=_checked, help="PyTorch device: cpu, cuda or cuda:N."
)
backend_option = click.option(
    "--executor",
    "backend",
    type=click.Choice(get_args(BackendName)),
    default="torch",
    show_default=True,
    help="PyTorch, or the bundle's graphs in ONNX Runtime or as TensorRT engines.",
)
policy_option = click.option(
    "--policy", type=PolicyType, help="Tree policy; +lookup: with copies.  [default: the bundle's]"
)
max_batch_option = click.option(
    "--max-batch", type=click.IntRange(1, 4096), help="Requests that decode together.  [default: the bundle's]"
)
tensor_parallel_option = click.option(
    "--tensor-parallel",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Processes that share the target, on CUDA a GPU each.",
)
max_waiting_option = click.option(
    "--max-waiting", type=click.IntRange(0, 10**6), default=256, show_default=True, help="Requests that may wait."
)
drain_option = click.option(
    "--drain-timeout", type=Seconds(), default=30, show_default=True, help="Seconds at shutdown."
)
prefix_cache_option = click.option(
    "--prefix-cache/--no-prefix-cache", default=None, help="Reuse K/V of shared prefixes.  [default: the bundle's]"
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a server's engine, whose values the command gets as `engine`."""
    options = {
        "max_batch": max_batch_option,
        "prefix_cache": prefix_cache_option,
        "policy": policy_option,
        "device": device_option,
        "tensor_parallel": tensor_parallel_option,
        "backend": backend_option,
    }

    @wraps(command)
    def with_engine(**values: Any) -> Any:
        engine = {name: values.pop(name) for name in options}
        return command(engine=engine, **values)

    for option in reversed(options.values()):
        with_engine = option(with_engine)
    return with_engine


held_out_option = click.option(
    "--prompts",
    type=FilePath,
    multiple=True,
    help="JSONL of {id, turns}; repeatable. Held out: neither trained on nor evaluated.  [default: our own two dozen]",
)
