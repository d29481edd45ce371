"""Options for JSON schemas: which objects are closed, and that answers fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from d2sd.errors import RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.runtime.grammar.schemas import text_with_options, with_options
from d2sd.serve.tools import tool_grammar
from tests.runtime.grammar.test_guidance import fits
from tests.runtime.grammar.tokens import guidance

NAME: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = NAME | {"additionalProperties": False}


def closed(schema: Any) -> Any:
    return with_options(schema, compact=False, closed=True)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAME, CLOSED),
        (NAME | {"additionalProperties": True}, NAME | {"additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "array", "items": NAME}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [NAME, {"type": "string"}]}, {"prefixItems": [CLOSED, {"type": "string"}]}),
        ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [NAME]}, {"allOf": [CLOSED]}),
        ({"$ref": "#/$defs/n", "$defs": {"n": NAME}}, {"$ref": "#/$defs/n", "$defs": {"n": CLOSED}}),
        # schemas for one object: closed, each would refuse what the other names
        ({"allOf": [NAME, NAME]}, {"allOf": [NAME, NAME]}),
        (NAME | {"anyOf": [NAME, NAME]}, NAME | {"anyOf": [NAME, NAME]}),
        ({"allOf": [{"anyOf": [NAME]}, {}]}, {"allOf": [{"anyOf": [NAME]}, {}]}),
        # what only looks like a keyword
        ({"properties": {"properties": NAME}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"enum": [{"properties": {}}]}, {"enum": [{"properties": {}}]}),
        ({"default": {"properties": {}}}, {"default": {"properties": {}}}),
    ],
)
def test_objects_that_name_their_properties_are_closed(schema: Any, expected: Any) -> None:
    given = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == given, "the caller's schema is not changed"
    assert json.loads(text_with_options(given, compact=False, closed=True)) == expected


def test_without_an_option_a_schema_is_as_it_was() -> None:
    assert with_options(NAME, compact=False, closed=False) is NAME
    for text in ("[", "5", "[1]", "[" * 20_000):
        assert text_with_options(text, compact=True, closed=True) == text


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(50_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="too deeply"):
        closed(schema)
    while schema:  # freed one by one: the interpreter would recurse
        schema = schema["items"]


def fit(text: str, **fields: Any) -> bool:
    form = StructuredOutputsParams(**fields)
    assert isinstance(form.json, str)
    return fits(guidance().json_schema(form.json, "here"), text)


def test_answers() -> None:
    assert fit('{"a": 1, "b": 2}', json=NAME)
    assert fit('{"a": 1}', json=NAME, disable_additional_properties=True)
    assert not fit('{"a": 1, "b": 2}', json=NAME, disable_additional_properties=True)
    assert not fit('{"a": 1}', json=NAME, disable_any_whitespace=True)
    assert fit('{"a":1}', json=json.dumps(NAME), disable_any_whitespace=True)
    assert fit('{"x":[1,2]}', json_object=True, disable_any_whitespace=True)
    assert not fit('{"x":[1, 2]}', json_object=True, disable_any_whitespace=True)


def test_options_apply_to_the_forms_of_other_fields() -> None:
    of = StructuredOutputsParams.of_response_format
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": NAME}}
    form = of(wrapped, disable_additional_properties=True)
    assert form is not None
    assert json.loads(str(form.json)) == CLOSED
    tools = [{"type": "function", "function": {"name": "f", "parameters": NAME}}]
    form = tool_grammar(tools, "required", disable_additional_properties=True)
    assert form is not None
    assert form.grammar is not None
    for arguments, good in (('{"a": 1}', True), ('{"a": 1, "b": 2}', False)):
        call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert fits(guidance().lark(form.grammar, "tools"), call) is good


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"type": "json_object", "schema": 5}, "response_format.schema"),
        ({"type": "json_object", "json_schema": {"schema": [1]}}, "response_format.json_schema.schema"),
        ({"type": "json_object", "shape": {}}, "response_format.shape"),
        ({"type": "text", "grammar": "x"}, "response_format.grammar"),
        ({"type": "json_schema", "schema": "x"}, "response_format.schema"),
    ],
)
def test_a_response_format_has_no_part_that_is_ignored(value: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams.of_response_format(value)
    assert caught.value.where == where


def test_a_schema_is_honoured_wherever_it_stands() -> None:
    of = StructuredOutputsParams.of_response_format
    expected = StructuredOutputsParams(json=NAME)
    for value in (
        {"type": "json_object", "schema": NAME},
        {"type": "json_object", "json_schema": {"schema": NAME}},
        {"type": "json_schema", "name": "n", "strict": True, "schema": NAME},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": NAME}},
    ):
        assert of(value) == expected
    assert of({"type": "json_object", "schema": {}}) == StructuredOutputsParams(json_object=True)
    assert of({"type": "json_object", "schema": None}) == StructuredOutputsParams(json_object=True)
