"""Data-parallel training: a single process, or those started by `torchrun`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from d2sd.errors import D2SDError

#: Collective timeout: other ranks wait while the main process computes features or evaluates, which may take hours.
_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Dist:
    """Rank and device of this process; `torchrun --nproc-per-node N` sets the variables that `init` reads."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @staticmethod
    def init() -> Dist:
        """Join the process group; each process gets one GPU if CUDA is available, or shares one if there are fewer."""
        cuda = torch.cuda.is_available()
        size = int(os.environ.get("WORLD_SIZE", "1"))
        gpus = torch.cuda.device_count() if cuda else 1
        local = int(os.environ.get("LOCAL_RANK", "0")) % gpus
        shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > gpus  # what NCCL refuses
        device = f"cuda:{local}" if cuda else "cpu"
        if cuda:
            torch.cuda.set_device(local)
        if size == 1:
            return Dist(device=device)
        if not distributed.is_initialized():
            # gloo as well as nccl: a long barrier on the CPU does not occupy a GPU
            distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda and not shared else "gloo", timeout=_TIMEOUT)
        return Dist(distributed.get_rank(), size, device)

    def destroy(self) -> None:
        """Leave the process group, if there is one.

        This ends its threads: a thread that frees a Python tensor during interpreter shutdown aborts the process.
        """
        if self.size > 1:
            distributed.destroy_process_group()

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        """Wrap `module` so that its gradients are averaged over all processes."""
        if self.size == 1:
            return module
        # a separate group: DDP never releases its group, so `destroy` could not end the default one
        return DistributedDataParallel(module, process_group=distributed.new_group(timeout=_TIMEOUT))

    def check(self, batch: int, where: str) -> None:
        """Raise D2SDError if the batch size is not divisible by the number of processes."""
        if batch % self.size:
            raise D2SDError(
                "the batch size is not divisible by the number of processes",
                where=where,
                found=batch,
                expected=f"a multiple of {self.size}",
            )

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            distributed.all_reduce(torch.zeros(1))

    def all_reduce_any(self, flags: Tensor) -> Tensor:
        """Elementwise `any` over all processes of a bool tensor of any shape, on the CPU."""
        if self.size == 1:
            return flags
        counts = flags.int()
        distributed.all_reduce(counts)
        return counts > 0

    def mean(self, values: dict[str, float]) -> dict[str, float]:
        """Mean of every value over all processes."""
        if self.size == 1:
            return values
        total = torch.tensor(list(values.values()), dtype=torch.float64)
        distributed.all_reduce(total)
        return dict(zip(values, (total / self.size).tolist(), strict=True))
