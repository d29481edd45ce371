"""Joins the processes of one machine to a group: gloo on CPUs, NCCL between GPUs with gloo for messages."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from d2sd.modeling.shard import Shard
from d2sd.modeling.tensor_parallel import Group, PeerLost

#: Longest wait for other ranks inside a pass: they may compile kernels meanwhile.
_PASS = timedelta(minutes=10)
#: Longest wait for the next message: an idle engine sends none.
_IDLE = timedelta(days=20)
#: Longest wait for ranks that are all there to connect, which takes milliseconds.
_CONNECT = timedelta(minutes=1)
_READY = "ready"

#: Called again and again with the ranks that have not come yet; returns after a moment, or raises.
Pause = Callable[[list[int]], None]


def join(shard: Shard, folder: Path, device: str, pause: Pause = lambda absent: time.sleep(0.02)) -> Group:
    """Meet the other ranks in `folder`, which no one else can write. Every rank calls it once.

    Processes are connected over the loopback interface: nothing else reaches them. Raises PeerLost if they cannot be.
    """
    distributed: Any = import_module("torch.distributed")  # its stubs lack much of what is used
    try:
        store = distributed.FileStore(str(folder / "store"), shard.size)
        store.set_timeout(_CONNECT)
        store.set(f"{_READY}{shard.rank}", "1")
        while absent := [rank for rank in range(shard.size) if not store.check([f"{_READY}{rank}"])]:
            pause(absent)
        # rank 0 sends messages; the others wait for the next one
        control = _gloo(distributed, store, "control", shard, _IDLE if shard.rank else _PASS, pause)
        if device == "cpu":
            return Group(shard, _gloo(distributed, store, "data", shard, _PASS, pause), control)
        return Group(shard, _nccl(distributed, store, "data", shard, device), control)
    except RuntimeError as error:  # of gloo and of the store
        raise PeerLost(str(error).splitlines()[0]) from error


def _gloo(distributed: Any, store: Any, name: str, shard: Shard, timeout: timedelta, pause: Pause) -> Any:
    kind, group = distributed.ProcessGroupGloo, Future[Any]()
    options = kind._Options()
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout, options._threads = _CONNECT, 2

    def connect() -> None:
        try:
            group.set_result(kind(distributed.PrefixStore(name, store), shard.rank, shard.size, options))
        except Exception as error:
            group.set_exception(error)

    Thread(target=connect, daemon=True).start()  # it blocks, and what `pause` raises is raised at once
    while not group.done():
        pause([])
    group.result().set_timeout(timeout)
    return group.result()


def _nccl(distributed: Any, store: Any, name: str, shard: Shard, device: str) -> Any:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)  # only to meet; what is summed passes between the GPUs
    torch.cuda.set_device(device)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _PASS
    return distributed.ProcessGroupNCCL(distributed.PrefixStore(name, store), shard.rank, shard.size, options)
