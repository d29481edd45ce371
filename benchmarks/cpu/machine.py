"""What the machine can do: how fast it reads memory and multiplies, and the least time of a plain step from that."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import BaseModel

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.target import parse_target_config, target_shapes

#: Bytes read to measure memory: more than caches hold.
BUFFER = 512 << 20
_SIZE, _RUNS = 2048, 7


class Machine(BaseModel):
    """Measured with all threads that contestants use."""

    threads: int
    read_gb_per_s: float
    gemm_gflops: float  # fp32

    @classmethod
    def measured(cls, threads: int, buffer: int = BUFFER, size: int = _SIZE) -> Machine:
        """Best of several runs: the limits are those of an undisturbed machine."""
        data = torch.ones(buffer // 4096, 1024)
        vector, left, right = torch.ones(1024), torch.rand(size, size), torch.rand(size, size)
        # Two ways to read: which one reaches the speed of memory depends on PyTorch's build.
        read = min(_best(data.sum), _best(lambda: data @ vector))
        gemm = _best(lambda: left @ right)
        return cls(threads=threads, read_gb_per_s=data.nbytes / read / 1e9, gemm_gflops=2 * size**3 / gemm / 1e9)

    def floor(self, weight_bytes: int) -> float:
        """Milliseconds to read the weights once."""
        return weight_bytes / self.read_gb_per_s / 1e6


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    run()
    found = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def weight_count(target: Path) -> int:
    """Weights that a plain step reads: all; an embedding next to a head of its own is only looked up."""
    config = parse_target_config(HFConfig.read(target))
    sizes = {name: torch.Size(shape).numel() for name, shape in target_shapes(config).items()}
    return sum(sizes.values()) - (0 if config.tie_word_embeddings else sizes["embed_tokens.weight"])
