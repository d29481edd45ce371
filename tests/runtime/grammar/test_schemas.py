"""Options for JSON schemas: which objects are closed, and that answers fit."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from d2sd.errors import RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.runtime.grammar.schemas import text_with_options, with_options
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.serve.tools import tool_grammar
from tests.choosing import stable_hash
from tests.runtime.grammar.test_guidance import fits
from tests.runtime.grammar.tokens import END, guidance, ids, runner, text_of
from tests.runtime.helpers import make_engine
from tests.tiny import CASES

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


Regex = str


def some_schema(dice: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = dice.choice(["integer", "boolean", "null", "string", "enum", *(["array", "object"] * 2 if depth else [])])
    if kind == "enum":
        return {"enum": dice.sample(["a", "Ann", 1, 22, None, True, "é\n"], dice.randint(1, 3))}
    if kind == "integer":
        low = dice.randint(-20, 20)
        return {"type": kind, "minimum": low, "maximum": low + dice.randint(0, 30)}
    if kind == "string":
        return {"type": kind, "maxLength": dice.randint(0, 4)}
    if kind == "array":
        return {"type": kind, "items": some_schema(dice, depth - 1), "maxItems": dice.randint(0, 2)}
    if kind == "object":
        names = dice.sample(["a", "b", "name", "age"], dice.randint(0, 2))
        properties = {name: some_schema(dice, depth - 1) for name in names}
        return {"type": kind, "properties": properties, "required": names[:1], "additionalProperties": False}
    return {"type": kind}


def valid(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "array":
        fits = isinstance(value, list) and len(value) <= schema["maxItems"]
        return fits and all(valid(one, schema["items"]) for one in value)
    if kind == "object":
        known = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"])
        return known and all(valid(one, schema["properties"][name]) for name, one in value.items())
    return value is None if kind == "null" else isinstance(value, bool)


def some_regex(dice: random.Random, depth: int = 2) -> Regex:
    kind = dice.choice(["text", "class", *(["join", "either", "repeat"] if depth else [])])
    if kind == "text":
        return re.escape(dice.choice(["a", "name", "{", "3-", "é", " "]))
    if kind == "class":
        return dice.choice(["[a-f]", "[0-9]", "[^a-z]", "[a-zA-Z ]"])
    if kind == "repeat":
        low = dice.randint(0, 2)
        return f"({some_regex(dice, depth - 1)}){{{low},{low + dice.randint(0, 2)}}}"
    return f"({some_regex(dice, depth - 1)}{'|' if kind == 'either' else ''}{some_regex(dice, depth - 1)})"


def test_valid_says_what_is_valid() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, None]}}, "required": ["a"]}
    assert valid({"a": 1}, schema)
    wrong: tuple[Any, ...] = ({}, {"a": True}, {"a": 1, "b": 1}, [], None)
    assert not any(valid(value, schema) for value in wrong)
    assert not valid([1, 1], {"type": "array", "items": {"type": "null"}, "maxItems": 3})
    assert not valid(5, {"type": "integer", "minimum": 6, "maximum": 9})


@pytest.mark.parametrize(
    ("policy", "seed"),
    [("hybrid", 0), *(pytest.param(policy, stable_hash(policy), marks=pytest.mark.slow) for policy in CASES)],
)
def test_answers_are_in_their_language(policy: str, seed: int) -> None:
    """Each seed: 16 schemas and 16 expressions, greedy and sampled, in one batch under one policy."""
    dice = random.Random(seed)
    forms: list[dict[str, Any] | Regex] = [make(dice) for make in (some_schema, some_regex) for _ in range(16)]
    tool = guidance()
    requests = [
        Request(
            ids(dice.choice(["x", "{", "[1"])),
            50,
            SamplingParams(temperature=dice.choice([0, 1, 1.5]), seed=n + 1),
            grammar=tool.regex(form, "regex") if isinstance(form, str) else tool.json_schema(json.dumps(form), "json"),
        )
        for n, form in enumerate(forms)
    ]
    engine = make_engine(runner(seed, policy), policy, max_batch=16)
    ended = 0
    for form, sequence in zip(forms, engine.generate(requests), strict=True):
        assert sequence.error is None
        if sequence.finish == "length":
            continue
        ended += 1
        assert sequence.answer[-1] == END
        text = text_of(sequence.answer)
        assert re.fullmatch(form, text) if isinstance(form, str) else valid(json.loads(text), form), (form, text)
    assert ended > 24
