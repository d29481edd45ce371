"""Values, bytes and parts of chat templates that no reader expects."""

from __future__ import annotations

import random
import re

#: What is written in place of a value: valid in JSON, in YAML, or in neither.
VALUES = (
    *("0", "-1", "1", "2", "3.5", "1e400", "-0.0", "true", "null", "[]", "{}", '""', "[[]]", '{"a": 1}', "a", '"a"'),
    *("off", "~", "0b_", "0x_", "1_0", "12:30", "2001-99-99", "2001-01-01", ".inf", "-.inf", ".nan", "NaN", "Infinity"),
    *("!!int a", "!!timestamp a", "!!bool a", "!!float a", "!!binary a", "!!set {a}", "!!python/name:os.system", "<<"),
    *(str(2**31), str(2**63), str(2**64), str(10**30), "9" * 4400, "0x" + "f" * 5000, "1" * 400 + ".5"),
    *(r'"\U00110000"', r'"\ud800"', r'"\0"', r'"a\u0000b"', '"' + "x" * 100_000 + '"', "../" * 40, "/dev/zero"),
    *("[" * 1000, "[" * 1000 + "]" * 1000, "{a: " * 300, '{"a":' * 5000, "&a [*a]", "*a", "&a a", "? [a]", "- a"),
    "[&0 [x]" + "".join(f", &{i + 1} [{', '.join([f'*{i}'] * 9)}]" for i in range(9)) + "]",  # an alias bomb
    *("\x00", "\x1b[2J", "\xa0", "é", "\u2028", "\x85", "\t", ":", "#", "%", "@", "`", "|", ">", "\n", "\n\n- a\n"),
)
#: A value of JSON or of flow YAML.
_VALUE = re.compile(rb'(?<=[:,\[{ ])\s*("(?:[^"\\]|\\.)*"|[-+\w./]+)(?=[,\]}\s])')


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return `data` with one to three faults: values replaced, or bytes changed, removed, inserted or doubled."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kind = draw.randrange(10)
        found = list(_VALUE.finditer(data)) if kind < 6 else []
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 1, 2, 8, 40, 400)))
        if found:
            value = draw.choice(found)
            new = draw.choice(VALUES).encode() if kind < 5 else draw.choice(found).group(1)
            data = data[: value.start(1)] + new + data[value.end(1) :]
        elif kind == 6:
            data = data[:at]
        elif kind == 7:
            data = data[:at] + data[end:]
        elif kind == 8:
            data = data[:end] + data[at:]
        else:
            data = data[:at] + draw.choice((draw.randbytes(1), b"\xff", b"\x00", b"{", b"]", b"\n", b" ")) + data[end:]
    return data


#: Parts of chat templates; `N` becomes a number.
# fmt: off
FRAGMENTS = (
    "{{ N**(N**N) }}", "{% set x=[0]*10**N %}", "{{ '%N0000000d'|format(1) }}", "{{ 'a'|center(10**N) }}",
    "{{ 1 / 0 }}", "{% for i in range(99999) %}", "{% endfor %}", "{% set n.x = n.x ~ n.x %}",
    "{% set n = namespace(x='ab') %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "{{ " + "(" * 999 + "1" + ")" * 999 + " }}",
    "{{ x.y }}", "{% if N**(N**N) %}{% endif %}", "{{ range(10**N) }}", "{%", "{% include 'x' %}", "{% filter upper %}",
    "{{ range(99999)|map('string')|join('a'*10**N) }}", "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ raise_exception('no') }}", "{{ messages|tojson(N) }}", "{{ strftime_now('%Y' * 10**N) }}", "w1 ", "\x00",
    "\ud800", "{% generation %}w1{% endgeneration %}", "{{ ''.__class__ }}", "{{ ('a' * 10**N)|sort|list|length }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}", "{{ lipsum(n=N) }}", "{{ (N,)*10**N }}", "{{ -N|abs }}",
    "{{ messages.append(messages) }}{{ messages|string }}", "{{ 'a'*10**N|int }}", "{{ [messages]*10**N|length }}",
    "{{ joiner('a'*10**N)() }}", "{{ N|pprint }}",
)
# fmt: on
