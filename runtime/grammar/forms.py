"""Structured output as a caller asks for it. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from d2sd.errors import RequestError
from d2sd.runtime.grammar.schemas import text_with_options, with_options

#: The fields of `StructuredOutputsParams` of which one is given.
FORMS = ("json", "regex", "choice", "grammar", "json_object")
#: Keys of a response format; name, description and strict are for people and for other servers.
_FORMAT_KEYS = {"type", "json_schema", "schema", "name", "description", "strict"}


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form of an answer, with vLLM's names: exactly one of the first five fields, and options.

    Attributes:
        json: a JSON schema, as a mapping or as text. Answers have at most one space after a colon or comma and none
            elsewhere, unless the schema has {"x-guidance": {"whitespace_flexible": true}}.
        regex: a regular expression in Rust's syntax that the whole answer matches.
        choice: the strings of which the answer is one.
        grammar: a Lark grammar in llguidance's dialect.
        json_object: True for any JSON object.
        disable_any_whitespace: no space in JSON outside of its strings.
        disable_additional_properties: objects of a JSON schema that names properties have no others, unless it says
            so: what vLLM's default backend does. Without it they may, as the standard has it.

    Raises `RequestError` naming the field.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        forms = [name for name in FORMS if getattr(self, name) is not None]
        if len(forms) != 1:
            raise RequestError(
                "Structured output takes one form.",
                where="structured_outputs",
                found=", ".join(forms) or "none",
                expected="one of json, regex, choice, grammar, json_object",
            )
        if self.json_object and self.disable_any_whitespace:
            object.__setattr__(self, "json", {"type": "object"})
            object.__setattr__(self, "json_object", None)
        compact, closed = self.disable_any_whitespace, self.disable_additional_properties
        if isinstance(self.json, str):
            object.__setattr__(self, "json", text_with_options(self.json, compact=compact, closed=closed))
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", to_json(with_options(self.json, compact=compact, closed=closed)))
        if self.choice is not None:
            texts = () if isinstance(self.choice, str) else tuple(self.choice)
            if not texts or not all(isinstance(text, str) and text for text in texts):
                raise RequestError(
                    "The choices are not strings.",
                    where="structured_outputs.choice",
                    found=self.choice,
                    expected="a list of non-empty strings",
                )
            object.__setattr__(self, "choice", texts)
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                kind = value if isinstance(value, type) else type(value)
                fix = f"pass json={kind.__name__}.model_json_schema()" if hasattr(kind, "model_json_schema") else None
                what = "This is not a JSON schema." if name == "json" else "This is not text."
                raise RequestError(what, where=f"structured_outputs.{name}", found=kind.__name__, fix=fix)

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    @property
    def digest(self) -> bytes:
        """A hash of the form."""
        return sha256(repr(self).encode("utf-8", "surrogatepass")).digest()

    @staticmethod
    def of_response_format(value: Mapping[str, Any] | None, **options: Any) -> StructuredOutputsParams | None:
        """From OpenAI's `response_format`, with a schema for `json_object` too; None for plain text.

        The schema may be inside `json_schema`, as OpenAI's chats have it, or next to the type, as its responses
        and other servers do. `options` are the fields `disable_...`. Raises `RequestError` for what it does not have.
        """
        if value is None:
            return None
        kind = value.get("type")
        if unknown := sorted(map(str, value.keys() - _FORMAT_KEYS)):
            raise RequestError("This is not part of a response format.", where=f"response_format.{unknown[0]}")
        if kind == "text":
            return None
        if kind not in ("json_object", "json_schema"):
            raise RequestError(
                "Unknown response format.",
                where="response_format.type",
                found=kind,
                expected="text, json_object or json_schema",
            )
        wrapped, schema, where = value.get("json_schema"), value.get("schema"), "response_format.schema"
        if schema is None and (kind == "json_schema" or wrapped is not None):
            schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
            where = "response_format.json_schema.schema"
        if kind == "json_object" and (schema is None or schema == {}):
            return StructuredOutputsParams(json_object=True, **options)
        if not isinstance(schema, Mapping):
            raise RequestError("The schema is missing.", where=where, found=schema, expected="a JSON schema")
        return StructuredOutputsParams(json=schema, **options)


def to_json(value: object) -> str:
    """Return a value as JSON text. Raises `RequestError`."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("This is not JSON.", where="structured_outputs.json", found=error) from None
