"""The paged write: its bytes must equal the reference's; its rate is compared with a copy's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Note
from benchmarks.gpu.timing import Times
from d2sd.plugins.kv_pages import write_pages

# Shape letters as in plugins/kv_pages/reference.py. Qwen3-8B: 36 layers of 8 K/V heads of 128.

PAGE_SIZE, KV_HEADS, SIZE = 16, 8, 128


@dataclass(frozen=True)
class Write:
    """B requests that write `places` rows each; of a pass of `rows` where an accepted path is committed."""

    batch: int
    places: int
    rows: int | None = None
    fp8: bool = False
    layers: int = 36

    @property
    def name(self) -> str:
        what = f"commit {self.places} of {self.rows}" if self.rows else f"chunk of {self.places}"
        return f"{what} x{self.batch}{' fp8' if self.fp8 else ''}"

    def bytes_moved(self, kept: int) -> int:
        """Keys and values read in bf16 and written, where `kept` of all B·N places are written."""
        return 2 * self.layers * kept * KV_HEADS * SIZE * (2 + (1 if self.fp8 else 2))


WRITES = (Write(1, 512), Write(32, 16, 64), Write(32, 16, 64, fp8=True), Write(8, 8, 64), Write(1, 8, 64))


def cases() -> Iterator[Case]:
    for write in WRITES:
        yield f"writes/{write.name}", partial(time_write, write)


def time_write(write: Write, _: Note, device: str = "cuda") -> dict[str, Any]:
    """Milliseconds and bytes; the result is checked first."""
    arguments = make_write(write, device)
    assert_same(arguments, written(arguments))
    times = Times()
    times.add("ours", lambda: write_pages.triton(**arguments))
    times.again()
    return {"bytes": write.bytes_moved(int(arguments["keep"].sum())), "times": times.figures()}


def make_write(write: Write, device: str) -> dict[str, Any]:
    """Arguments of `write_pages`: the places begin in the middle of a page, one in eight is not kept."""
    draw = torch.Generator(device).manual_seed(write.places)
    batch, places, rows = write.batch, write.places, write.rows or write.places
    columns = -(-(places + 5) // PAGE_SIZE)
    shape = (write.layers, 1 + batch * columns, PAGE_SIZE, KV_HEADS, SIZE)
    kind = torch.float8_e4m3fn if write.fp8 else torch.bfloat16
    k, v = (
        torch.randn(write.layers, batch, rows, KV_HEADS, SIZE, generator=draw, device=device, dtype=torch.bfloat16)
        for _ in "kv"
    )
    path = torch.rand(batch, rows, generator=draw, device=device).argsort(dim=1)[:, :places] if write.rows else None
    scale = torch.linspace(0.005, 0.02, write.layers, device=device) if write.fp8 else None
    return {
        "k": k,
        "v": v,
        "k_pages": torch.full(shape, 7.0, device=device, dtype=torch.bfloat16).to(kind),
        "v_pages": torch.full(shape, 7.0, device=device, dtype=torch.bfloat16).to(kind),
        "page_table": 1 + torch.randperm(batch * columns, generator=draw, device=device).view(batch, columns),
        "positions": (5 + torch.arange(places, device=device)).expand(batch, places).contiguous(),
        "keep": torch.rand(batch, places, generator=draw, device=device) > 0.125,
        "path": path,
        "k_scale": scale,
        "v_scale": None if scale is None else scale.flip(0) / 3,
    }


def written(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Pools after the kernel, bytes [L, P, Z, Hkv, D·n]; those of the arguments stay as they are."""
    pools = {name: arguments[name].clone() for name in ("k_pages", "v_pages")}
    write_pages.triton(**arguments | pools)
    return pools["k_pages"].view(torch.uint8), pools["v_pages"].view(torch.uint8)


def assert_same(arguments: dict[str, Any], found: tuple[Tensor, Tensor]) -> None:
    """Bit for bit the reference's, except in page 0, the scratch page."""
    write_pages.reference(**arguments)
    for name, pages in zip(("k_pages", "v_pages"), found, strict=True):
        expected = arguments[name].view(torch.uint8)
        assert torch.equal(pages[:, 1:], expected[:, 1:]), f"{name} differ from the reference"
