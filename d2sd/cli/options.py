"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from d2sd.bundle.devices import check_device
from d2sd.bundle.options import EngineOptions, ServiceOptions
from d2sd.option_types import FilePath as FilePath  # for all commands
from d2sd.option_types import PolicyType, RealRange


def _checked(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not context.resilient_parsing:
        check_device(value)
    return value


_FIELDS: dict[str, Any] = {
    name: field
    for table in (EngineOptions, ServiceOptions)
    for name, field in table.model_json_schema()["properties"].items()
}
#: Names of options that differ from the fields', and more arguments of Click's.
_DECLARED = {"backend": ("--executor", "backend")}
_MORE: dict[str, dict[str, Any]] = {"policy": {"type": PolicyType}, "device": {"callback": _checked}}
_TYPES = {"integer": click.IntRange, "number": RealRange}

bundle_argument = click.argument("bundle", type=FilePath)


def table_option(name: str) -> Callable[..., Any]:
    """The option of a field of `EngineOptions` or `ServiceOptions`: its type, default and help are the field's."""
    field = _FIELDS[name]
    kind = field.get("anyOf", [field])[0]  # without null
    option, more = f"--{name.replace('_', '-')}", _MORE.get(name, {})
    if kind["type"] == "boolean":
        option += option.replace("--", "/--no-")
    elif "enum" in kind:
        more = {"type": click.Choice(kind["enum"])} | more
    elif kind["type"] in _TYPES:
        more = {"type": _TYPES[kind["type"]](kind["minimum"], kind["maximum"])}
    own = field["default"] is not None
    text = field["description"] if own else f"{field['description']}  [default: the bundle's]"
    declared = _DECLARED.get(name, (option,))
    return click.option(*declared, default=field["default"], show_default=own, help=text, **more)


device_option, backend_option, max_waiting_option, drain_option = map(
    table_option, ("device", "backend", "max_waiting", "drain_timeout")
)


def engine_options(*without: str) -> Callable[..., Any]:
    """The options of an engine but some, whose values the command gets as `engine`."""
    names = [name for name in EngineOptions.model_fields if name not in without]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_engine(**values: Any) -> Any:
            engine = EngineOptions(**{name: values.pop(name) for name in names})
            return command(engine=engine, **values)

        for name in reversed(names):
            with_engine = table_option(name)(with_engine)
        return with_engine

    return decorate


held_out_option = click.option(
    "--prompts",
    type=FilePath,
    multiple=True,
    help="JSONL of {id, turns}; repeatable. Held out: neither trained on nor evaluated.  [default: our own two dozen]",
)
