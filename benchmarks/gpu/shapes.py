"""Shapes of cascade attention that are checked and timed, and the bytes that each must read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGE_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """One call: a request for each of `contexts` (tokens committed)."""

    contexts: tuple[int, ...]
    rows: int
    heads: int = 32  # Qwen3-8B's and Llama-3.1-8B's
    kv_heads: int = 8
    size: int = 128
    kind: str = "bf16"
    fp8: bool = False  # FP8 pages

    @property
    def name(self) -> str:
        lengths = sorted(set(self.contexts))
        lengths_said = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]}-{lengths[-1]}"
        return f"{lengths_said}x{len(self.contexts)} r{self.rows} {self.group_name}"

    @property
    def group_name(self) -> str:
        """The group of a table line, without the rows."""
        return f"{self.heads}/{self.kv_heads}x{self.size} {self.kind}{'/fp8' if self.fp8 else ''}"

    @property
    def dtype(self) -> torch.dtype:
        return TYPES[self.kind]

    @property
    def columns(self) -> int:
        """Pages per request for the longest context."""
        return max(1, -(-max(self.contexts) // PAGE_SIZE))

    @property
    def slots(self) -> int:
        return self.columns * PAGE_SIZE

    def bytes_read(self) -> int:
        """Keys and values of all contexts and of the new rows, each once: the minimum of any kernel."""
        token = 2 * self.kv_heads * self.size
        old = sum(self.contexts) * token * (1 if self.fp8 else self.dtype.itemsize)
        return old + len(self.contexts) * self.rows * token * self.dtype.itemsize

    def flops(self) -> int:
        """Operations of both products of every row with every key, masked or not."""
        keys = sum(self.contexts) + len(self.contexts) * self.rows
        return 4 * self.rows * self.heads * self.size * keys

    def bytes_held(self) -> int:
        """Device memory that timing it takes, roughly: pools, K and V side by side for the peers and once more for the
        gather, FlashInfer's longer pools, a bias for every row, and the reference of one request.
        """
        batch, keys = len(self.contexts), self.slots + self.rows
        numbers = 2 * batch * keys * self.kv_heads * self.size
        bias = batch * self.rows * self.heads // self.kv_heads * keys
        one = 4 * (2 * self.heads * self.rows * keys + 2 * self.kv_heads * keys * self.size)
        return 6 * numbers * self.dtype.itemsize + 3 * bias * self.dtype.itemsize + one


#: The gate of the kernel: docs/gpu.md, row 20.
GATE = Shape((32768,) * 8, 64)
#: Rows from which tensor cores bound the kernel, not memory: its goal is a share of their peak.
COMPUTED = 64
#: A verification pass and plain decoding behind 2,048 tokens, and one row behind many.
SHORT = (
    Shape((2048,), 64),
    *(Shape((2048,) * batch, 1) for batch in (1, 8, 32)),
    *(Shape((32768,) * batch, 1) for batch in (1, 8)),
)


def timed() -> Iterator[Shape]:
    """Most informative first: the time may not suffice for all."""
    qwen = [
        Shape((context,) * batch, rows)
        for rows in (64, 16, 160)
        for context in (8192, 32768, 1024)
        for batch in (8, 32, 1)
    ]
    yield GATE
    yield from SHORT
    yield from (shape for shape in qwen[:9] if shape != GATE)
    yield from (replace(shape, fp8=True) for shape in qwen[:9] if len(shape.contexts) != 8)
    yield from (
        Shape((context,) * batch, 64, heads=9, kv_heads=3, size=64) for context in (8192, 1024) for batch in (8, 32, 1)
    )
    yield from qwen[9:]


def flexed() -> Iterator[Shape]:
    """A few of them for FlexAttention, which recompiles for each."""
    for context, batch, rows in (
        (8192, 8, 64),
        (32768, 8, 64),
        (8192, 32, 64),
        (8192, 1, 64),
        (8192, 8, 160),
        (8192, 8, 16),
        (1024, 8, 64),
    ):
        yield Shape((context,) * batch, rows)
