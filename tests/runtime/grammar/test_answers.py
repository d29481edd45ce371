"""Answers to random schemas and expressions are in their language, whatever the policy and the temperature."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from d2sd.policies import NAMES, PolicyName
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.grammar.tokens import END, guidance, ids, runner, text_of
from tests.runtime.helpers import make_engine

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
    [("hybrid", 0), *(pytest.param(policy, seed, marks=pytest.mark.slow) for seed, policy in enumerate(NAMES, 1))],
)
def test_answers_are_in_their_language(policy: PolicyName, seed: int) -> None:
    """Each seed: 16 schemas and 16 expressions, greedy and sampled, in one batch under one policy."""
    dice = random.Random(seed)
    forms: list[dict[str, Any] | Regex] = [make(dice) for make in (some_schema, some_regex) for _ in range(16)]
    tool = guidance()
    requests = [
        Request(
            ids(dice.choice(["x", "{", "[1"])), 50, SamplingParams(temperature=dice.choice([0, 1, 1.5]), seed=n + 1),
            grammar=tool.regex(form, "regex") if isinstance(form, str) else tool.json_schema(json.dumps(form), "json"),
        )
        for n, form in enumerate(forms)
    ]  # fmt: skip
    engine = make_engine(runner(seed), policy, max_batch=16)
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
