"""Renders chat templates in a process of its own, which is killed when a template asks for too much.

A template is a program from a checkpoint: one expression of it can take all memory, or run for years, and Python cannot
interrupt it. `template_program.py` is what runs there.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from d2sd.helpers import python_command

_PROGRAM = Path(__file__).with_name("template_program.py")
#: Environment variables of the process; it gets no others, such as keys.
_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_CHUNK = 1 << 20


class TemplateError(Exception):
    """The template failed, or asked for too much; the text says how."""


class TooLong(TemplateError):
    """The template renders more text than allowed; the text counts the characters until it was stopped."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Bounds of one rendering; templates of real models need milliseconds and a megabyte."""

    #: Processor seconds, compiling included.
    seconds: float = 2.0
    #: Bytes of memory beyond those of the idle process.
    memory: int = 512 << 20
    #: Characters of the rendered conversation; a context of a million tokens is shorter.
    length: int = 16 << 20
    #: Seconds until the answer, on a machine however loaded.
    patience: float = 30.0


class TemplateProcess:
    """One process, started when it is first needed and again after it was killed. Threads take turns."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self.limits = limits or TemplateLimits()
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """The text of `template` with the variables `values`, which JSON must be able to hold.

        Raises `TemplateError`, for values that JSON cannot hold too, and OSError if no process can be started.
        """
        try:
            line = json.dumps({"template": template, "values": values}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from None
        with self._lock:
            answer = self._ask(line)
        if "text" in answer:
            text: str = answer["text"]
            return text
        if "length" in answer:
            raise TooLong(f"{answer['length']:,}")
        raise TemplateError(answer["error"])

    def close(self) -> None:
        """End the process, if one runs."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Let go of the process without ending it: after a fork it is the parent's."""
        self._lock, self._process, self._socket = Lock(), None, None

    def _ask(self, line: bytes) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it was killed between two requests
        if self._process is None:
            self._start()
        try:
            answer: dict[str, Any] = json.loads(self._exchange(line))
        except BaseException as error:  # also Ctrl-C: half an answer may be on its way
            code = self._end()
            if isinstance(error, (OSError, EOFError, ValueError, RecursionError)):
                raise TemplateError(self._reason(code, error)) from None
            raise
        if answer.get("memory"):
            self._end()  # what it has left is not known
        return answer

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    python_command(str(_PROGRAM)),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # out of reach of the terminal's signals
                )
        except BaseException:
            ours.close()
            raise
        self._socket = ours
        ours.settimeout(self.limits.patience)
        ours.sendall(json.dumps(asdict(self.limits)).encode() + b"\n")

    def _exchange(self, line: bytes) -> bytes:
        """Send one line and receive one. Raises OSError or EOFError."""
        assert self._socket is not None
        end = time.monotonic() + self.limits.patience
        self._socket.settimeout(self.limits.patience)
        self._socket.sendall(line)
        parts, size = list[bytes](), 0
        while not parts or not parts[-1].endswith(b"\n"):
            self._socket.settimeout(max(end - time.monotonic(), 1e-3))
            part = self._socket.recv(_CHUNK)
            size += len(part)
            if not part or size > 12 * self.limits.length + _CHUNK:  # a character takes at most 12 bytes of JSON
                raise EOFError
            parts.append(part)
        return b"".join(parts)

    def _end(self) -> int | None:
        """Kill the process and wait for it. Return how it ended: a negative number is a signal."""
        process, connection = self._process, self._socket
        self._process = self._socket = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        process.kill()  # one that a limit has ended keeps its own code
        return process.wait()

    def _reason(self, code: int | None, error: Exception) -> str:
        if code == -signal.SIGPROF:
            return f"more than {self.limits.seconds:g} s"
        if isinstance(error, TimeoutError):
            return f"no answer within {self.limits.patience:g} s"
        return f"the process that renders it ended with code {code}"


#: The one of this process; servers and commands share it.
PROCESS = TemplateProcess()
atexit.register(PROCESS.close)
os.register_at_fork(after_in_child=PROCESS.forget)
