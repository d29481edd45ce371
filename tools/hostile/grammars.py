"""Forms of answers that are expensive to compile, expensive to follow, or that fail on the way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tools.hostile.case import CHAT, Case, Kind, Scene, letters, size

#: Characters of the longest grammar that is not refused for its length.
_ROOM = 60_000


def _structured(draw: random.Random, scene: Scene, **form: Any) -> Case:
    """A completion of this form; from time to time it is long, so that the form is followed for a while."""
    return Case.of(scene.completion(draw, structured_outputs=form, max_tokens=draw.choice((1, scene.answer, 24))))


# -- regular expressions -----------------------------------------------------------------------------------------------


def regex(draw: random.Random) -> str:
    """A hostile regular expression."""
    m, n, k = size(draw, 5, 5000), size(draw, 5, 5000), draw.randint(2, 9)
    unicode_class = draw.choice(
        (r"\p{L}", r"\w", r"[^a]", r"\p{Greek}", r"[\u4e00-\u9fff]", r"(?i)\p{Lu}", ".", r"\PN")
    )
    return draw.choice(
        (
            f"(a{{{m}}}){{{n}}}",
            f"((a{{{k}}}){{{k}}}){{{m}}}",
            f"(a|b|ab|ba){{{m}}}c",
            f"({unicode_class}{{{m}}}){{{n}}}",
            rf"({unicode_class}\p{{N}}*\w+){{1,{n}}}",
            "(" * k + "a" + "+)" * k + "$",
            "(a*)*" * k + "b",
            f"(a?){{{m}}}a{{{m}}}",
            "("
            + "|".join(letters(draw, draw.randint(2, 30), "abc") for _ in range(size(draw, 10, 2000)))
            + f"){{1,{k}}}",
            f"(.*{unicode_class}){{{draw.randint(3, 30)}}}x",
            f"(.*a.{{{draw.randint(5, 40)}}})",
            "(" * m + "a" + ")" * m,
            f"(?:{unicode_class}|\\d){{{m},{m + n}}}[^\\n]{{{n}}}",
            f"a{{{10 ** draw.randint(4, 30)}}}",
            f"a{{{n},}}b" * k,
            letters(draw, size(draw, 100, _ROOM), "ab.*+?[](){}|\\"),
            r"\b\B" * k + r"(?=a)(?<!b)\1",
            f"[a-z]{{0,{m}}}|" * k,
        )
    )


def _regex(draw: random.Random, scene: Scene) -> Case:
    """Counts in counts, classes of Unicode, alternations, and what makes backtracking engines hang."""
    return _structured(draw, scene, regex=regex(draw))


# -- JSON schemas ------------------------------------------------------------------------------------------------------


def _patterns(draw: random.Random) -> Any:
    """An intersection of patterns."""
    patterns = [f".*{letters(draw, draw.randint(1, 4), 'abcdef')}.*" for _ in range(draw.randint(8, 24))]
    return {"type": "string", "allOf": [{"pattern": one} for one in patterns]}


def _references(draw: random.Random) -> Any:
    """References in a circle, to nothing, to themselves, or that double at every step."""
    count = draw.randint(2, 24)
    circle = {f"d{n}": {"$ref": f"#/$defs/d{(n + 1) % count}"} for n in range(count)}
    ref = {"$ref": "#/$defs/d1"}
    double = {
        f"d{n}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}, "b": {"$ref": f"#/$defs/d{n + 1}"}},
            "required": ["a", "b"],
        }
        for n in range(count)
    }
    double[f"d{count}"] = {"type": "null"}
    both = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{max(0, n - 1)}"}]} for n in range(count)
    }
    return draw.choice(
        (
            {"$ref": "#"},
            {"$ref": "#/$defs/d0", "$defs": circle},
            {"$ref": "#/$defs/d0", "$defs": double},
            {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
            {"allOf": [{"$ref": "#"}]},
            {"$ref": "http://127.0.0.1:1/x"},
            {"$ref": "#/$defs/d0", "$defs": both | {f"d{count}": {"const": 1}}},
            {"$ref": "#/$defs/" + "x" * 5000},
            {"$ref": "file:///etc/passwd"},
            {"type": "array", "items": {"$ref": "#"}, "minItems": 3},
            {"not": {"$ref": "#"}},
            {"properties": {"a": ref}, "$defs": {"d1": {"allOf": [ref, ref]}}},
        )
    )


def _counts(draw: random.Random) -> Any:
    """Huge, negative, fractional and contradictory counts, as numbers and as texts."""
    huge = draw.choice((10**400, 10**30, 2**63, 1e308, "1" + "0" * 400, -5, 0.5, 9999, 10_000, 10_001, "9", True, [3]))
    other = draw.choice((0, 1, huge, 5000))
    key, low = draw.choice(
        (
            ("maxItems", "minItems"),
            ("maxLength", "minLength"),
            ("maxProperties", "minProperties"),
            ("maximum", "minimum"),
            ("exclusiveMaximum", "multipleOf"),
        )
    )
    kind = {"I": "array", "L": "string", "P": "object"}.get(key[3], "number")
    inner: Any = {"type": kind, key: huge, low: other}
    for _ in range(draw.randint(0, 3)):
        inner = {"type": "array", "items": inner, "minItems": draw.choice((1, 100, 9999)), "maxItems": 9999}
    return inner


def _deep(draw: random.Random) -> Any:
    """Deep nesting."""
    made: Any = {"type": "integer"}
    shape = draw.randrange(3)
    for _ in range(size(draw, 10, 300)):
        made = (
            {"type": "array", "items": made},
            {"properties": {"a": made}, "required": ["a"]},
            {"anyOf": [made, {}]},
        )[shape]
    return made


def _broad(draw: random.Random) -> Any:
    """Enums, properties, patterns of properties and alternatives by the thousand."""
    count = size(draw, 100, 4000)
    names = [letters(draw, draw.choice((3, 12)), "abcdefghij") for _ in range(min(count, _ROOM // 30))]
    match draw.randrange(7):
        case 0:
            return {"enum": names}
        case 1:
            return {
                "type": "object",
                "properties": {name: {} for name in names},
                "required": names[: draw.randint(0, 900)],
            }
        case 2:
            return {"type": "object", "properties": {letters(draw, size(draw, 1000, _ROOM)): {"type": "null"}}}
        case 3:
            return {"type": "object", "patternProperties": {f"^{name}.*x": {"type": "string"} for name in names[:300]}}
        case 4:
            return {
                "anyOf": [
                    {"type": "object", "properties": {name: {"const": name}}, "required": [name]}
                    for name in names[:600]
                ]
            }
        case 5:
            one = {"anyOf": [{"properties": {name: {"enum": [1, "a"]}}} for name in names[:12]]}
            return {"allOf": [one] * draw.randint(2, 9)}
        case _:
            return {"oneOf": [{"type": "string", "pattern": f"{name}+.*"} for name in names[:200]]}


def _odd(draw: random.Random) -> Any:
    """Values of the wrong type, formats, and llguidance's own keys."""
    return draw.choice(
        (
            {"type": draw.choice(("nothing", 5, [], ["string", "string"], None))},
            {"pattern": regex(draw)},
            True,
            False,
            {},
            {"type": "string", "format": draw.choice(("date-time", "uuid", "email", "x" * 9000, "regex"))},
            {"x-guidance": {"whitespace_pattern": "(\\s*)*{1,9999}", "item_separator": "(,+)+"}},
            {"const": "\x00\ud800"},
            {"const": letters(draw, 50_000)},
            {"enum": []},
            {"properties": []},
            {"required": "a"},
            {"items": [{}] * 3000},
            {"x-guidance": {"coerce_one_of": True, "lenient": True}, "oneOf": [{}, {}]},
            {"if": {}, "then": False},
            {"minimum": 10**300, "maximum": 10**301, "type": "integer"},
            {"multipleOf": 1e-300, "type": "number"},
            {"%json": {}},
            {"$defs": {"a" * 9000: {}}},
            {"dependentRequired": {"a": ["b"]}},
            {"contains": {}, "minContains": 9**99},
        )
    )


_SHAPES: tuple[Callable[[random.Random], Any], ...] = (_patterns, _references, _counts, _deep, _broad, _odd)


def schema(draw: random.Random) -> Any:
    """A hostile JSON schema of any class."""
    return draw.choice(_SHAPES)(draw)


def _of_schema(make: Callable[[random.Random], Any]) -> Callable[[random.Random, Scene], Case]:
    """A request for such a schema, in one of the places where the API takes one."""

    def made(draw: random.Random, scene: Scene) -> Case:
        value = make(draw)
        if draw.random() < 0.5:
            return _structured(draw, scene, json=draw.choice((value, json.dumps(value))))
        wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": True}}
        return Case.of(scene.chat(draw, response_format=wrapped, max_tokens=draw.choice((1, 24))), CHAT)

    return made


# -- Lark, choices, tools ----------------------------------------------------------------------------------------------


def _lark(draw: random.Random) -> str:
    """A hostile Lark grammar."""
    k, m = draw.randint(6, 20), size(draw, 10, 2000)
    words = [letters(draw, draw.randint(1, 4), "abcdef") for _ in range(k)]
    return draw.choice(
        (
            "start: A\nA: " + " & ".join(f"/.*{word}.*/" for word in words),
            'start: start start | "a" |',
            "start: start",
            "start: A\nA: " + " & ".join(f"~/.*{word}.*/" for word in words),
            'start: e\ne: e "+" e | e "*" e | "a"',
            "start: a\n" + "\n".join(f"a{n or ''}: a{n + 1} a{n + 1}" for n in range(k)) + f'\na{k}: "x"',
            "start: x\nx: y\ny: x",
            f'start: ("a" | "b" | "ab")~{m}..{2 * m}',
            "start: " + " | ".join(f'"{word * 40}"' for word in words * 30),
            'start: a b c\na: "x"*\nb: "x"*\nc: "x"* "y"',
            f"start: A~{10 ** draw.randint(3, 25)}\nA: /a+/",
            'start: ""',
            "start: " + "(" * m + '"a"' + ")" * m,
            f"start: %json {json.dumps(schema(draw))}",
            f"start: /{regex(draw)}/",
            'start: %regex {"substring_chars": ' + json.dumps(letters(draw, size(draw, 100, 40_000))) + "}",
            "%" * m,
            "start: gen\ngen[max_tokens=" + "9" * 30 + "]: /.*/",
            "start: a[lazy]\n" * k,
            'start: <[999999999]> <special> "a"',
        )
    )


def _of_lark(draw: random.Random, scene: Scene) -> Case:
    """Intersections, ambiguity, recursion to the left and without an end."""
    return _structured(draw, scene, grammar=_lark(draw))


def _choice(draw: random.Random, scene: Scene) -> Case:
    """Thousands of choices that begin alike, long ones, and quotes."""
    stem = letters(draw, draw.choice((1, 200)))
    count = size(draw, 10, 5000)
    choices = draw.choice(
        ([f"{stem}{n}" for n in range(count)], [stem * count], ['"\\' * n for n in range(1, 300)], [""])
    )
    return _structured(draw, scene, choice=choices)


def _repeated(draw: random.Random, scene: Scene) -> Case:
    """The same grammar again and again, of a few that take long and are refused."""
    again = random.Random(draw.randrange(3))
    poison = (
        {"json": _patterns(again)} if again.random() < 0.5 else {"grammar": _lark(random.Random(again.randrange(9)))}
    )
    return Case.of(scene.completion(draw, structured_outputs=poison))


def _tools(draw: random.Random, scene: Scene) -> Case:
    """Tools by the thousand, with schemas of every class, and names of any kind."""
    names: tuple[Callable[[int], Any], ...] = (
        lambda n: f"f{n}",
        lambda n: f"f{n}",
        lambda n: "f",
        lambda n: draw.choice(("é", "好", "\x00", "a" * 65, "", "a b", 5, None)),
    )
    name, count = draw.choice(names), draw.choice((1, 1, 3, size(draw, 10, 3000)))
    tools: list[Any] = [
        {
            "type": "function",
            "function": {
                "name": name(n),
                "description": letters(draw, 30),
                "parameters": schema(draw) if n < 3 else {},
            },
        }
        for n in range(count)
    ]
    if draw.random() < 0.2:
        tools = draw.choice(([None], [[]], [{"type": "function"}], [{"type": "x" * 10**5}], [{"function": {}}] * 2000))
    choice = draw.choice(
        ("required", "required", "auto", {"type": "function", "function": {"name": "f0"}}, "none", "x" * 10**5)
    )
    return Case.of(scene.chat(draw, tools=tools, tool_choice=choice), CHAT)


KINDS = (
    Kind("regex", _regex),
    Kind("schema: patterns", _of_schema(_patterns), at_once=8),
    Kind("schema: references", _of_schema(_references)),
    Kind("schema: counts", _of_schema(_counts)),
    Kind("schema: deep", _of_schema(_deep)),
    Kind("schema: broad", _of_schema(_broad)),
    Kind("schema: odd", _of_schema(_odd)),
    Kind("lark", _of_lark),
    Kind("choice", _choice),
    Kind("grammar: repeated", _repeated, at_once=8),
    Kind("tools", _tools),
)
