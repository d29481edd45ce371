"""Measures how fast the machine reads as many bytes as a plain step does, and how fast it multiplies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from d2sd.bench.result import Part
from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.target_shapes import target_shapes
from d2sd.modeling.native import packed_product

#: Bytes read to measure memory.
BUFFER = 512 << 20
_SIZE, _RUNS = 2048, 15
#: Of the weights by which products read memory: so large that the calls take no time.
_OUTPUTS, _INPUTS = 16384, 1024


class Machine(Part):
    """Measured with all threads that contestants use."""

    threads: int
    read_gb_per_s: float
    gemm_gflops: float  # fp32

    @classmethod
    def measured(cls, threads: int, buffer: int = BUFFER, size: int = _SIZE) -> Machine:
        """Best of several runs: the limits are those of an undisturbed machine."""
        left, right = torch.rand(size, size), torch.rand(size, size)
        gemm = _best(lambda: left @ right)
        read = buffer / read_seconds(buffer) / 1e9
        return cls(threads=threads, read_gb_per_s=read, gemm_gflops=2 * size**3 / gemm / 1e9)


def read_seconds(size: int) -> float:
    """Seconds to read `size` bytes again and again, which is what plain steps do: caches hold some of them.

    By the fastest of several ways, because a limit is one only if nothing is faster: sums, and products of one row by
    the kernels of a step.
    """
    return min(size / read * _best(run) for read, run in _readers(size))


def _readers(size: int) -> Iterator[tuple[int, Callable[[], object]]]:
    """Bytes that a run reads, about `size`, and the run; one is released before the next is made."""
    data, vector = torch.ones(max(1, size // 4 // _INPUTS), _INPUTS), torch.ones(_INPUTS)
    yield data.nbytes, data.sum
    yield data.nbytes, lambda: data @ vector
    for dtype in (torch.float32, torch.bfloat16):
        row = torch.ones(1, _INPUTS, dtype=dtype)
        outputs = min(_OUTPUTS, max(1, size // dtype.itemsize // _INPUTS))
        count = max(1, size // (outputs * _INPUTS * dtype.itemsize))
        products = [packed_product(torch.ones(outputs, _INPUTS, dtype=dtype), None) for _ in range(count)]
        yield count * outputs * _INPUTS * dtype.itemsize, lambda: [product(row) for product in products]  # noqa: B023


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
