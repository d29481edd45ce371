"""Measures what this card can do at most: a copy, a read, a fill, and large matrix products, with its clocks.

`ceilings/copy` is the measure of every other rate; a kernel that only reads is measured by `ceilings/read`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from benchmarks.gpu.cases import Case, Note
from benchmarks.gpu.timing import Times

#: Larger than any cache by far; an eighth of what is free where that is less.
LARGEST = 4 << 30
KEY = "ceilings/copy"
#: Rows, outputs and inputs: of a large product, and of Qwen3-8B's widest layer at the rows of eight trees.
PRODUCTS = {"8192": (8192, 8192, 8192), "512 rows": (512, 24576, 4096)}
_PROGRAMS, _BLOCK = 132 * 8, 4096
_CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


def cases() -> Iterator[Case]:
    yield KEY, measure
    yield "ceilings/read", partial(memory, "read")
    yield "ceilings/fill", partial(memory, "fill")
    for kind in ("bf16", "fp8"):
        for name, shape in PRODUCTS.items():
            yield f"ceilings/product {kind} {name}", partial(product, kind, shape)


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of the numbers of each program."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    largest = tl.full([BLOCK], -2147483648, tl.int32)
    for start in range(program * BLOCK, count, programs * BLOCK):
        largest = tl.maximum(largest, tl.load(x + start + tl.arange(0, BLOCK)))
    tl.store(out + program, tl.max(largest, 0))


def measure(_: Note, device: str = "cuda") -> dict[str, Any]:
    """GB/s, bytes read and bytes written together; and what the least work in a graph takes, which bounds all times."""
    source = _bytes(device)
    target, one = torch.empty_like(source), torch.zeros(1, device=device)
    times = Times()
    times.add("copy", lambda: target.copy_(source))
    times.add("least", lambda: one.add_(1))
    times.again()
    assert torch.equal(source, target)
    return _rate(times, "copy", 2 * source.nbytes)


def memory(what: str, _: Note, device: str = "cuda") -> dict[str, Any]:
    """GB/s of a read, or of a fill."""
    source, times = _bytes(device), Times()
    numbers = source.view(torch.int32)
    if what == "read":
        out = torch.empty(_PROGRAMS, dtype=torch.int32, device=device)
        times.add(what, lambda: read_kernel[(_PROGRAMS,)](numbers, out, numbers.numel(), BLOCK=_BLOCK, num_warps=8))
        assert torch.equal(out.max(), numbers.max())
    else:
        times.add(what, lambda: numbers.fill_(7))
    times.again()
    return _rate(times, what, source.nbytes)


def product(kind: str, shape: tuple[int, int, int], _: Note, device: str = "cuda") -> dict[str, Any]:
    """TFLOP/s of PyTorch's product of random numbers."""
    rows, outputs, inputs = shape
    draw = torch.Generator(device).manual_seed(1)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=draw, device=device, dtype=torch.bfloat16)

    x, weights, one = numbers(rows, inputs), numbers(outputs, inputs), torch.ones((), device=device)
    run: Callable[[], Any] = partial(torch.nn.functional.linear, x, weights)
    if kind == "fp8":
        narrow = x.to(torch.float8_e4m3fn), weights.to(torch.float8_e4m3fn).t()
        run = partial(torch._scaled_mm, *narrow, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    times = Times()
    times.add(kind, run)
    times.again()
    figures = times.figures()
    return {"tflops": 2 * rows * outputs * inputs / figures[kind]["ms"] / 1e9, "times": figures, "card": card()}


def card() -> str:
    """Clocks, watts and why the clocks are not higher, as the driver says them now."""
    try:
        query = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"


def _bytes(device: str) -> torch.Tensor:
    size = min(LARGEST, torch.cuda.mem_get_info()[0] // 8) // 4096 * 4096
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)  # zeros can be faster than data


def _rate(times: Times, name: str, moved: int) -> dict[str, Any]:
    figures = times.figures()
    return {"bytes": moved, "gb_per_s": moved / figures[name]["ms"] / 1e6, "times": figures, "card": card()}
