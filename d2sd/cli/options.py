"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from d2sd.bundle.backends import check_device
from d2sd.bundle.options import EngineOptions
from d2sd.option_types import FilePath as FilePath  # for all commands
from d2sd.option_types import PolicyType, Seconds


def _checked(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not context.resilient_parsing:
        check_device(value)
    return value


_FIELDS: dict[str, Any] = EngineOptions.model_json_schema()["properties"]

bundle_argument = click.argument("bundle", type=FilePath)


def engine_option(name: str, *declared: str, **more: Any) -> Callable[..., Any]:
    """The option of a field of `EngineOptions`: its type, default and help are the field's."""
    field = _FIELDS[name]
    kind = field.get("anyOf", [field])[0]  # without null
    if name == "policy":
        more["type"] = PolicyType
    elif "enum" in kind:
        more["type"] = click.Choice(kind["enum"])
    elif kind["type"] == "integer":
        more["type"] = click.IntRange(kind["minimum"], kind["maximum"])
    own = field["default"] is not None
    text = field["description"] if own else f"{field['description']}  [default: the bundle's]"
    declared = declared or (f"--{name.replace('_', '-')}",)
    return click.option(*declared, default=field["default"], show_default=own, help=text, **more)


device_option = engine_option("device", callback=_checked)
backend_option = engine_option("backend", "--executor", "backend")
policy_option = engine_option("policy")
tensor_parallel_option = engine_option("tensor_parallel")
max_waiting_option = click.option(
    "--max-waiting", type=click.IntRange(0, 10**6), default=256, show_default=True, help="Requests that may wait."
)
drain_option = click.option(
    "--drain-timeout", type=Seconds(), default=30, show_default=True, help="Seconds at shutdown."
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a server's engine, whose values the command gets as `engine`."""
    options = {
        "max_batch": engine_option("max_batch"),
        "prefix_cache": engine_option("prefix_cache", "--prefix-cache/--no-prefix-cache"),
        "policy": policy_option,
        "device": device_option,
        "tensor_parallel": tensor_parallel_option,
        "backend": backend_option,
    }

    @wraps(command)
    def with_engine(**values: Any) -> Any:
        engine = EngineOptions(**{name: values.pop(name) for name in options})
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
