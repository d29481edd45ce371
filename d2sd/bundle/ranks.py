"""The processes of a tensor-parallel target: rank 0 starts the others, watches them, and ends them with itself."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from d2sd.errors import D2SDError, RankLost
from d2sd.helpers import python_command

if TYPE_CHECKING:
    from d2sd.modeling.shard import Shard
    from d2sd.modeling.tensor_parallel import Group

#: Exit code of a rank that has lost another one.
PEER_LOST = 74
#: Seconds in which the rank that ended first is found among those that lost it.
_BLAME = 2.0
#: Seconds for the others to end by themselves.
_PATIENCE = 5.0
#: Seconds for the others to have loaded when rank 0 has.
_LOADING = 600.0
_SILENT = "does not answer, and the engine has ended."


class Ranks:
    """Ranks 1 .. `size` - 1 of the target of a bundle; this process is rank 0."""

    def __init__(self, bundle: Path, size: int, device: str) -> None:
        """Start the processes, which begin to load their parts of the target."""
        import torch

        self.size, self.device = size, device
        self._folder = tempfile.TemporaryDirectory(prefix="d2sd-ranks-")  # of mode 0700
        self._lost: RankLost | None = None
        self._gone = Event()  # set with `_lost`
        self._listeners: list[Callable[[D2SDError], None]] = []
        self._lock, self._following = Lock(), False
        self._closed = Event()
        self.group: Group  # since `join`
        common = {"bundle": str(bundle), "size": size, "threads": torch.get_num_threads()}
        self._processes = {
            rank: _start(self._folder.name, common | {"rank": rank, "device": rank_device(device, rank)})
            for rank in range(1, size)
        }
        self._end = weakref.finalize(self, _end, self._processes, self._closed)
        for rank, process in self._processes.items():
            Thread(
                target=_watch, args=(weakref.ref(self), rank, process), name=f"d2sd-rank-{rank}", daemon=True
            ).start()

    def join(self, shard: Shard) -> Group:
        """Wait for the others, and connect to them. Raises RankLost if one of them ends, or does not come in time."""
        from d2sd.modeling.tensor_parallel import PeerLost
        from d2sd.runtime.parallel.join import join

        end = time.monotonic() + _LOADING

        def pause(absent: list[int]) -> None:
            if absent and time.monotonic() > end:
                self._lose(absent, _SILENT)
            self.check(0.02)

        try:
            self.group = join(shard, Path(self._folder.name), self.device, pause)
        except PeerLost:
            raise self.lost() from None
        self.group.blame = self.lost
        return self.group

    def check(self, seconds: float = 0) -> None:
        """Raise RankLost if a rank has ended, or ends within so many seconds."""
        if self._gone.wait(seconds):
            raise self.lost()

    def begin_engine(self, options: Mapping[str, Any]) -> None:
        """Let the others follow a new engine, which they make with these options of `make_engine`."""
        self.end_engine()
        line = json.dumps(dict(options)).encode() + b"\n"
        try:
            for process in self._processes.values():
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
        except (OSError, ValueError):  # it has ended, and its input may be closed
            raise self.lost() from None
        self._following = True

    def end_engine(self) -> None:
        """Let the others leave the engine that they follow; they keep their parts of the target."""
        from d2sd.runtime.parallel.follower import END
        from d2sd.runtime.parallel.messages import send

        with self._lock:
            following, self._following = self._following, False
        if following and self._lost is None:
            try:
                send(self.group, END)
            except RankLost:
                return

    def on_failure(self, report: Callable[[D2SDError], None]) -> None:
        """Call `report` in another thread when a rank ends before `close`."""
        with self._lock:
            self._listeners.append(report)
        if self._lost is not None:
            report(self._lost)

    def lost(self) -> RankLost:
        """The rank that ended, known by now or within moments; else those that do not answer."""
        if not self._gone.wait(_BLAME + 1):
            self._lose(self._running(), _SILENT)
        return self._lost or RankLost("The connection between the ranks is lost.", where=f"{self.size} ranks")

    def close(self) -> None:
        """End the other processes; returns when they have ended.

        They end with their input, wherever they are: in a pass that failed here they would take a message for its sums.
        """
        self._end()
        self._folder.cleanup()

    def _ended(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Called in the thread that waits for `process`, which has ended."""
        if self._closed.is_set():
            return
        end = time.monotonic() + _BLAME
        while process.returncode == PEER_LOST and not self._gone.is_set() and time.monotonic() < end:
            self._gone.wait(0.05)  # another rank ended first
        if process.returncode == PEER_LOST and (silent := self._running()):
            self._lose(silent, _SILENT)  # this rank has waited as long as a pass may take
        else:
            code = process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._lose([rank], "has ended, and the engine with it.", how)

    def _running(self) -> list[int]:
        return [rank for rank, process in self._processes.items() if process.returncode is None]

    def _lose(self, ranks: list[int], how: str, found: str | None = None) -> None:
        """Report how ranks were lost, and end the others; the first report stays."""
        names, ids = (", ".join(map(str, some)) for some in (ranks, [self._processes[rank].pid for rank in ranks]))
        fix = "its messages are on stderr; start again"
        error = RankLost(f"Rank {names} of {self.size} {how}", where=f"process {ids}", found=found, fix=fix)
        with self._lock:
            if self._lost is not None or self._closed.is_set():
                return
            self._lost = error
            listeners = list(self._listeners)
            self._gone.set()
        for report in listeners:
            report(error)
        if self.device != "cpu" and hasattr(self, "group"):
            self.group.abort()  # a sum on a GPU would wait for ever
        self._end()


def rank_device(device: str, rank: int) -> str:
    """The device of a rank, if rank 0 has `device`."""
    if device == "cpu":
        return device
    first = int(device.partition(":")[2] or 0)
    return f"cuda:{first + rank}"


def _start(folder: str, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(python_command("d2sd.bundle.rank_process", folder), stdin=subprocess.PIPE)
    assert process.stdin is not None
    with suppress(OSError):  # it has ended, which `_watch` reports
        process.stdin.write(json.dumps(dict(settings)).encode() + b"\n")
        process.stdin.flush()
    return process


def _watch(ranks: weakref.ref[Ranks], rank: int, process: subprocess.Popen[bytes]) -> None:
    process.wait()
    if (alive := ranks()) is not None:
        alive._ended(rank, process)


def _end(processes: Mapping[int, subprocess.Popen[bytes]], closed: Event) -> None:
    """Close the input of the others, upon which they end; kill those that do not."""
    closed.set()
    for process in processes.values():
        assert process.stdin is not None
        with suppress(OSError):  # it is gone, with what was not read
            process.stdin.close()
    end = time.monotonic() + _PATIENCE
    for process in processes.values():
        try:
            process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
