"""Options for JSON schemas, as schemas: objects without further properties, and text without spaces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from d2sd.errors import RequestError

_COMPACT = {"whitespace_flexible": False, "key_separator": ":", "item_separator": ","}
#: Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = ("items", "additionalItems", "contains", "additionalProperties", "propertyNames", "unevaluatedProperties")
_SEVERAL = ("prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
#: Keywords that add other schemas to an object's own properties.
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "dependencies"})


def with_options(schema: Mapping[str, Any], *, compact: bool, closed: bool) -> Mapping[str, Any]:
    """Return a JSON schema for answers without whitespace, and without properties that it does not name.

    What the schema says itself, by `x-guidance` or `additionalProperties`, is kept. Raises `RequestError` for a schema
    that is nested too deeply.
    """
    try:
        adjusted = _closed(schema) if closed else schema
    except RecursionError:
        raise RequestError("The schema is nested too deeply.", where="structured_outputs.json") from None
    return {"x-guidance": _COMPACT, **adjusted} if compact else adjusted


def text_with_options(schema: str, *, compact: bool, closed: bool) -> str:
    """Return the text of a JSON schema with the same options; other text than a JSON object as it is."""
    if not compact and not closed:
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        return schema  # compiling it says what is wrong
    return json.dumps(with_options(parsed, compact=compact, closed=closed)) if isinstance(parsed, dict) else schema


def _closed(schema: Any, alone: bool = True) -> Any:
    """Close the objects of a schema that name properties.

    Objects that must fit several schemas at once stay open, because each schema would refuse the properties of the
    others; so does this one unless it is `alone`.
    """
    if isinstance(schema, Sequence) and not isinstance(schema, str):  # `items` of older drafts
        return [_closed(subschema, alone) for subschema in schema]
    if not isinstance(schema, Mapping):
        return schema
    names = "properties" in schema or "patternProperties" in schema
    result = dict(schema)
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            result[key] = {name: _closed(subschema) for name, subschema in value.items()}
        elif key in _ONE:
            result[key] = _closed(value)
        elif key in _SEVERAL and isinstance(value, Sequence):
            together = key != "prefixItems" and (names or not alone or (key == "allOf" and len(value) > 1))
            result[key] = [_closed(subschema, alone=not together) for subschema in value]
    if names and alone and not _COMBINING & schema.keys():
        result.setdefault("additionalProperties", False)
    return result
