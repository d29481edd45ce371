"""The program of ranks 1 and above: loads its part of a bundle's target, then follows rank 0's engines, one by one.

One JSON object a line on stdin: what to load, then the options of each engine. The end of stdin is the end of rank 0.
The argument is the folder in which the ranks meet; the last of them removes it, if rank 0 could not.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from d2sd.bundle.ranks import PEER_LOST
from d2sd.errors import D2SDError

#: Of prctl(2): the signal that comes when the parent has ended.
_PR_SET_PDEATHSIG = 1


def _read(lines: SimpleQueue[dict[str, Any]]) -> None:
    """Hand on the lines; end the process when there are no more, whatever it does."""
    for line in sys.stdin:
        lines.put(json.loads(line))
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(0)


def _serve(lines: SimpleQueue[dict[str, Any]]) -> None:
    settings = lines.get()
    import torch

    from d2sd.bundle.load import assemble
    from d2sd.bundle.serving import follow_engine
    from d2sd.manifest import load_manifest
    from d2sd.modeling.shard import Shard
    from d2sd.modeling.tensor_parallel import connect
    from d2sd.runtime.parallel.join import join

    torch.set_num_threads(settings["threads"])  # of rank 0: products of drafters have the same bits on every rank
    shard = Shard(settings["rank"], settings["size"])
    path = Path(settings["bundle"])
    bundle = replace(assemble(path, load_manifest(path), shard), keep=False)
    group = join(shard, Path(sys.argv[1]), settings["device"])
    connect(bundle.target, group)
    while True:
        follow_engine(bundle, group, settings["device"], **lines.get())


def main() -> None:
    """Run until stdin ends. Exits with `PEER_LOST` if another rank ends first."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when the others end
        signal.signal(number, signal.SIG_IGN)
    with suppress(AttributeError):  # of Linux: else a rank that is stopped would not see the end of rank 0
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    lines: SimpleQueue[dict[str, Any]] = SimpleQueue()
    Thread(target=_read, args=(lines,), daemon=True).start()
    code = 1
    try:
        _serve(lines)
    except D2SDError as error:
        code = 2
        print(f"d2sd: {error}", file=sys.stderr)
    except Exception as error:
        from d2sd.modeling.tensor_parallel import PeerLost

        code = PEER_LOST if isinstance(error, PeerLost) else 1
        if code == 1:
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of gloo or NCCL may wait for ranks that are gone


if __name__ == "__main__":
    main()
