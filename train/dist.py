"""Data-parallel training processes: one alone, or those that `torchrun` started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from d2sd.errors import D2SDError

#: The others wait while the main process computes features or evaluates, which may take hours.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Dist:
    """`torchrun --nproc-per-node N` sets what `init` reads."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @staticmethod
    def init() -> Dist:
        """Join the process group; one GPU each where there are GPUs."""
        cuda = torch.cuda.is_available()
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = f"cuda:{local}" if cuda else "cpu"
        if cuda:
            torch.cuda.set_device(local)
        if size == 1:
            return Dist(device=device)
        if not distributed.is_initialized():
            # gloo as well as nccl: a barrier of hours on the CPU blocks no GPU
            distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_PATIENCE)
        return Dist(distributed.get_rank(), size, device)

    def destroy(self) -> None:
        """Leave the process group, if there is one.

        Its threads end here: one that freed a Python tensor while Python exits would abort the process.
        """
        if self.size > 1:
            distributed.destroy_process_group()

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        """`module`, its gradients averaged over all processes."""
        if self.size == 1:
            return module
        # in a group of its own: DDP never releases its group, so `destroy` could not end it
        return DistributedDataParallel(module, process_group=distributed.new_group(timeout=_PATIENCE))

    def check(self, batch: int, where: str) -> None:
        """Raise D2SDError if the sequences of a step do not divide among the processes."""
        if batch % self.size:
            raise D2SDError(
                "the sequences of a step do not divide among the processes",
                where=where, found=batch, expected=f"a multiple of {self.size}",
            )  # fmt: skip

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
        """The mean over all processes of every value."""
        if self.size == 1:
            return values
        total = torch.tensor(list(values.values()), dtype=torch.float64)
        distributed.all_reduce(total)
        return dict(zip(values, (total / self.size).tolist(), strict=True))
