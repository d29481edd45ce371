"""Tries grammars in another process: nothing interrupts llguidance, and its limits do not bound every grammar."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import weakref
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock
from time import monotonic
from typing import Any

from d2sd.errors import D2SDError
from d2sd.helpers import interpreter, python_command

#: Most processor time of one grammar, in seconds: compilation, and the masks of a few random tokens.
SECONDS = 2.0
#: Most processor time of one mask, in seconds; masks of usual grammars take milliseconds or less.
SLOWEST = 0.1
#: Most time of the clock, in seconds, for a machine that has no time for the process.
_PATIENCE = 60.0
_PROGRAM = str(Path(__file__).with_name("child.py"))


class Abandoned(D2SDError):
    """The caller has stopped the trial."""


class Trial:
    """A process that compiles grammars and computes their first masks; thread-safe, one grammar at a time.

    It is started by the first grammar, and anew after one that ended it. `about` describes the tokenizer: `definition`
    as JSON text, `vocab_size` and `end_tokens`.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self._about, self._lock = json.dumps(about) + "\n", Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # its parent: not a fork of it

    def problem(self, grammar: str, limits: dict[str, Any], stop: Event | None = None) -> str:
        """Why the grammar is refused, "" if it is fine.

        Raises Abandoned soon after `stop` is set, and D2SDError if no process can be started.
        """
        with self._lock:
            if stop is not None and stop.is_set():
                raise Abandoned("The grammar is not needed any more.")
            process = self._started(stop)
            done = False
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps([grammar, limits, SECONDS, SLOWEST]) + "\n")
                process.stdin.flush()
                if not _wait(process, stop):
                    return f"it takes too long: more than {_PATIENCE:g} s"
                answer = process.stdout.readline()
                done = bool(answer)
                return str(json.loads(answer)) if done else _why(process)
            except BrokenPipeError:
                return _why(process)
            finally:
                if not done:
                    self.close()

    def close(self) -> None:
        """End the process; the next grammar starts another."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _started(self, stop: Event | None) -> subprocess.Popen[str]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        ready, reason = False, "it ends, or does not answer"
        try:
            process = _start()
            self._process, self._owner = process, os.getpid()
            self._finalizer = weakref.finalize(self, _end, process, self._owner)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(self._about)
            process.stdin.flush()
            ready = _wait(process, stop) and process.stdout.readline() == "ready\n"
        except OSError as error:  # there is no room for a process, or it ended before it had read anything
            reason = str(error)
        finally:
            if not ready:
                self.close()
        if not ready:
            raise D2SDError(
                "The process that tries grammars does not start.",
                where=_PROGRAM,
                found=reason,
                fix=f"run it: {interpreter()} {_PROGRAM}",
            )
        return process


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        python_command(_PROGRAM),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )


def _wait(process: subprocess.Popen[str], stop: Event | None) -> bool:
    """Wait for a line or the end of the process; False after too long a time. Raises Abandoned."""
    end = monotonic() + _PATIENCE
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout or 0, selectors.EVENT_READ)
        while not selector.select(0.05):
            if stop is not None and stop.is_set():
                raise Abandoned("The grammar is not needed any more.")
            if monotonic() > end:
                return False
    return True


def _why(process: subprocess.Popen[str]) -> str:
    """Why a process has ended instead of answering."""
    code = process.wait()
    if code == -signal.SIGPROF:
        return f"it takes too long: more than {SECONDS:g} s"
    return f"it takes too much memory, or ends its compiler (exit code {code})"


def _end(process: subprocess.Popen[str], owner: int) -> None:
    if owner != os.getpid():
        return  # a fork, whose parent uses the process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # of what was not written yet
                pipe.close()
