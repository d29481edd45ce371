"""Joins the processes of one machine to a group: gloo on CPUs, NCCL between GPUs with gloo for messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from d2sd.modeling.tensor_parallel import Group, Shard

#: Longest wait for other ranks inside a pass: they may compile kernels meanwhile.
_PASS = timedelta(minutes=10)
#: Longest wait for the next message: an idle engine sends none.
_IDLE = timedelta(days=20)
_READY = "ready"


def join(shard: Shard, folder: Path, device: str, wait: Callable[[Callable[[], bool]], None] | None = None) -> Group:
    """Meet the other ranks in `folder`, which no one else can write. Every rank calls it once.

    `wait` is called with a function that is true once all are there; it returns then, or raises.
    Processes are connected over the loopback interface: nothing else reaches them.
    """
    distributed: Any = import_module("torch.distributed")  # its stubs lack much of what is used
    store = distributed.FileStore(str(folder / "store"), shard.size)
    store.set(f"{_READY}{shard.rank}", "1")
    if wait is not None:
        wait(lambda: store.check([f"{_READY}{rank}" for rank in range(shard.size)]))
    control = _gloo(distributed, store, "control", shard, _IDLE)
    if device == "cpu":
        return Group(shard, _gloo(distributed, store, "data", shard, _PASS), control)
    return Group(shard, _nccl(distributed, store, "data", shard, device), control)


def _gloo(distributed: Any, store: Any, name: str, shard: Shard, timeout: timedelta) -> Any:
    kind = distributed.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout, options._threads = timeout, 2
    return kind(distributed.PrefixStore(name, store), shard.rank, shard.size, options)


def _nccl(distributed: Any, store: Any, name: str, shard: Shard, device: str) -> Any:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)  # only to meet; what is summed passes between the GPUs
    torch.cuda.set_device(device)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _PASS
    return distributed.ProcessGroupNCCL(distributed.PrefixStore(name, store), shard.rank, shard.size, options)
