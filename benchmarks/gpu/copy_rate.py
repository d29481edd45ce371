"""The device's memory bandwidth, measured by a large copy: the reference for every other rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Note
from benchmarks.gpu.timing import Times

#: Larger than any cache by far; an eighth of what is free where that is less.
LARGEST = 4 << 30
KEY = "copy/rate"


def cases() -> Iterator[Case]:
    yield KEY, measure


def measure(_: Note, device: str = "cuda") -> dict[str, Any]:
    """GB/s, bytes read and bytes written together; and what the least work in a graph takes, which bounds all times."""
    size = min(LARGEST, torch.cuda.mem_get_info()[0] // 8) // 4096 * 4096
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)  # zeros can be faster than data
    target, one = torch.empty_like(source), torch.zeros(1, device=device)
    times = Times()
    times.add("copy", lambda: target.copy_(source))
    times.add("least", lambda: one.add_(1))
    times.again()
    assert torch.equal(source, target)
    figures = times.figures()
    return {"bytes": size, "gb_per_s": 2 * size / figures["copy"]["ms"] / 1e6, "times": figures}
