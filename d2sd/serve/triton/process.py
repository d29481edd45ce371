"""The process of the model ends with the server."""

from __future__ import annotations

import os
import subprocess

#: Kills process $1 when its parent is not $0 any more, and ends with it. The fourth field of stat is the parent.
_WATCH = """
while read -r _ _ _ parent _ < "/proc/$1/stat"; do
    [ "$parent" = "$0" ] || { kill -9 "$1"; exit; }
    sleep 0.5
done
"""


def end_with_parent() -> subprocess.Popen[bytes]:
    """Start a shell that kills this process when its parent has ended: an orphan would keep the GPU.

    Triton leaves its model processes behind when it is killed, and when its exit timeout expires. They cannot notice by
    themselves: a call into the dead server waits forever and holds Python's global lock.
    """
    arguments = ["/bin/sh", "-c", _WATCH, str(os.getppid()), str(os.getpid())]
    silent = subprocess.DEVNULL
    return subprocess.Popen(arguments, stdin=silent, stdout=silent, stderr=silent, start_new_session=True)
