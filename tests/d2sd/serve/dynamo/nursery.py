"""A process that has imported everything and forks workers: a worker then starts in a second instead of fifteen.

Reads one JSON object a line, {"argv", "environ", "log"}; writes the process id of each worker.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module

#: Everything that a worker imports; no thread and no runtime of Dynamo may have started before the fork.
_MODULES = ("torch", "transformers", "d2sd.cli.worker", "d2sd.serve.dynamo.run", "d2sd.runtime.engine", "uvloop")


def main() -> None:
    from d2sd.serve.dynamo.run import load_sdk

    for module in _MODULES:
        import_module(module)
    load_sdk()
    import_module("dynamo.common.backend.run")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers are reaped at once
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            work(order)
        print(pid, flush=True)


def work(order: dict[str, object]) -> None:
    """Become a worker; does not return."""
    from d2sd.cli.main import main as command

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # not closed: uvloop aborts when it gets descriptor 0
    os.environ.update(order["environ"])  # type: ignore[call-overload]
    code = 1
    try:
        command(order["argv"], standalone_mode=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
