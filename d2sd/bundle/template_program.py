"""The program of the process that renders chat templates; `template_process.py` starts it and talks to it.

It imports nothing of d2sd: it runs by its path, with limits on memory and processor time that the kernel enforces, so
it does not matter what one expression of a template, or of the constants that Jinja folds while it compiles, asks for.
One JSON object a line, in and out, over the socket that is its standard input and output:

    in, once       {"memory": bytes, "seconds": of processor time a rendering, "length": in characters}
    in             {"template": str, "values": {...}}
    out            {"text": str}, {"length": more than allowed} or {"error": "TypeError: ...", "memory": bool}

The text is what transformers' `apply_chat_template` renders (`transformers.utils.chat_template_utils`, whose import
takes a second): the same sandbox, the same options, the same names.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from jinja2 import Template

#: Longest part of an error's text; the parent shows less.
_ERROR = 1000


def _limit(name: int, amount: int) -> None:
    """Lower a limit of this process; a stricter one stays."""
    _, hard = resource.getrlimit(name)
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    with suppress(OSError, ValueError):  # macOS has no limit of the address space
        resource.setrlimit(name, (amount, amount))


def _confine(memory: int) -> None:
    """Allow `memory` bytes beyond those in use, and neither core dumps nor files. Jinja must be imported before."""
    with suppress(OSError):  # /proc is Linux's
        memory += int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """Compile a template in the environment that transformers gives it."""
    from datetime import datetime

    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks answers for training and renders what it holds."""

        tags = {"generation"}  # noqa: RUF012, as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_held"), [], [], body).set_lineno(line)

        def _held(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    # templates pass them by position too, in transformers' order
    def tojson(
        x: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = 0
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(source)


def _rendered(line: bytes, length: int) -> dict[str, object]:
    """The answer to one request; a template can raise anything."""
    try:
        request = json.loads(line)
        parts, count = [], 0
        for part in _compiled(request["template"]).generate(**request["values"]):
            parts.append(part)
            count += len(part)
            if count > length:
                return {"length": count}
        return {"text": "".join(parts)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:_ERROR], "memory": isinstance(error, MemoryError)}


def _serve(requests: BinaryIO, answers: int) -> None:
    """Answer requests until the parent closes the socket, or is gone."""
    settings = json.loads(requests.readline())
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401, what `_compiled` needs is imported before memory is limited

    _confine(settings["memory"])
    while line := requests.readline():
        # processor time, which a loaded machine does not shorten; the default action of its signal is to kill
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
        answer = _rendered(line, settings["length"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        rest = memoryview(json.dumps(answer).encode() + b"\n")
        while rest:
            rest = rest[os.write(answers, rest) :]


if __name__ == "__main__":
    # the parent decides when it ends: Ctrl-C and a stop of the service are for the parent, which may still need it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(BrokenPipeError, ConnectionResetError):
        _serve(sys.stdin.buffer, sys.stdout.fileno())
