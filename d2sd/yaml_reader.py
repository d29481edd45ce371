"""YAML 1.2 as recipes use it: mappings, lists and plain values, within bounds.

PyYAML parses the text into nodes, and this module turns them into values. PyYAML's own constructors follow YAML 1.1
(where `off` is a boolean and 12:30 an integer), keep the last of two equal keys, and do not bound aliases.
"""

# PyYAML's types may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="import-untyped"
# mypy: allow-subclassing-any

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from d2sd.errors import RecipeError, shortened
from d2sd.io import MAX_DEPTH, SURROGATE, parse_int, read_text

#: Real recipes have 3 kB and 100 values.
_MAX_BYTES, _MAX_VALUES = 1 << 20, 20_000

_TAG = "tag:yaml.org,2002:"
#: YAML 1.2's core schema (section 10.3.2): type, spelling, and the characters that a value of the type begins with.
_CORE = (
    ("null", r"|~|null|Null|NULL", ["", "~", "n", "N"]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    """Resolves plain words by YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own)


for _type, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(_TAG + _type, re.compile(f"^(?:{_pattern})$"), _first)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping. Raises `RecipeError` naming the file, and the line where known."""
    values = parse_yaml(read_text(path, error=RecipeError, what="recipe", max_bytes=_MAX_BYTES), str(path), lines=True)
    if not isinstance(values, dict):
        raise RecipeError("A recipe is a mapping of keys.", where=path, found=type(values).__name__)
    return values


def parse_yaml(text: str, where: str, *, lines: bool = False) -> Any:
    """Return the value of one YAML document. Raises `RecipeError` naming `where`, with the line if `lines`."""
    try:
        # not yaml.load, which would use the loader's YAML 1.1 constructors
        node = yaml.compose(text, _Loader)
        return None if node is None else _Values().value(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}" if lines and mark is not None else where
        found = " ".join(filter(None, (error.context, error.problem)))
    except yaml.YAMLError as error:
        place, found = where, str(error).partition("\n")[0]
    except RecursionError:
        place, found = where, "nested too deep"
    except (ValueError, OverflowError) as error:  # an escape such as "\U00110000", which names no character
        place, found = where, str(error)
    raise RecipeError("Not valid YAML.", where=place, found=found)


class _Values:
    """Converts nodes to values and counts them; an alias counts at every use."""

    def __init__(self) -> None:
        self.count = 0

    def value(self, node: yaml.Node, depth: int = 0) -> Any:
        self.count += 1
        if self.count > _MAX_VALUES:
            raise _fault(node, f"more than {_MAX_VALUES:,} values, aliases expanded")
        if depth > MAX_DEPTH:
            raise _fault(node, f"nested more than {MAX_DEPTH} levels deep, or an alias of a value within itself")
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.value(child, depth + 1) for child in node.value]
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node, kind)
        raise _fault(node, f"the tag {shortened(node.tag)} is not supported")

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key_node, child in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _fault(key_node, "a key that is a list or a mapping")
            key = self.value(key_node, depth + 1)
            if key in values:
                raise _fault(key_node, f"key {shortened(repr(key))} is written twice")
            values[key] = self.value(child, depth + 1)
        return values


def _scalar(node: yaml.ScalarNode, kind: str) -> str | int | float | bool | None:
    text: str = node.value
    spellings = {name: pattern for name, pattern, _ in _CORE}
    if kind == "str":
        if "\0" in text or SURROGATE.search(text):
            raise _fault(node, "a string holds a NUL or half a surrogate pair, which is not text")
        return text
    if kind not in spellings or not re.fullmatch(spellings[kind], text):  # a tag, such as !!int a
        raise _fault(node, f"{shortened(text)!r} tagged {shortened(kind)}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    try:
        return int(text, 0) if text[:2] in ("0o", "0x") and len(text) <= 24 else parse_int(text)
    except ValueError as error:
        raise _fault(node, str(error)) from None


def _fault(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
