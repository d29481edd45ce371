"""The kernels' calls that are executed as PTX: every line of the tile table, and page writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.mask import pack_mask_bits
from d2sd.plugins.cascade_attention.triton.launch import launch
from d2sd.plugins.cascade_attention.triton.tiles import TileConfig, select_tile
from ptxsim.launch import Edit, Launch, executed_as_ptx
from tests.plugins.kernels.calls import in_fp8, read_back
from tests.plugins.test_cascade_attention import Call, Shape, ancestors, make

#: A100, L4 and L40, H100 and H200, RTX 50 and RTX PRO. B200, 100, is in test_blackwell.py.
CAPABILITIES = (80, 89, 90, 120)
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Attention:
    """One K/V head; contexts of several tiles, of one, and none."""

    kind: str
    size: int
    rows: int
    splits: int = 1
    fp8: bool = False
    contexts: tuple[int, ...] = (150, 37, 0)
    group: int = 4  # query heads of the K/V head

    @property
    def tile(self) -> TileConfig:
        return select_tile(self.rows * self.group, self.size, _TYPES[self.kind].itemsize, fp8=self.fp8)

    def __str__(self) -> str:
        pages = "-fp8" if self.fp8 else ""
        return f"{self.kind}{pages}-D{self.size}-rows{self.tile.rows}-splits{self.splits}"

    def call(self, seed: int = 0) -> Call:
        """Random numbers and trees; NaN in every slot of the pages that no request owns."""
        shape = Shape(
            contexts=self.contexts, rows=self.rows, kv_heads=1, group=self.group, size=self.size, page_size=16
        )
        call = make(shape, ancestors, seed).to(_TYPES[self.kind])
        return in_fp8(call, torch.tensor(0.011), torch.tensor(0.007)) if self.fp8 else call

    def run(
        self, capability: int, call: Call | None = None, edit: Edit | None = None, limit: int = 3_000_000
    ) -> tuple[Tensor, Tensor, Call, list[Launch]]:
        """What the PTX gives, what the specification says, the call over plain pages, and the launches."""
        call = call or self.call()
        plain = read_back(call) if self.fp8 else call
        with executed_as_ptx(capability, edit, limit) as launches:
            words = pack_mask_bits(call.attn_mask)
            found = launch(call.q, call.k, call.v, call.context, words, splits=self.splits)
        return found, plain.run(), plain, launches


def table() -> Iterator[Attention]:
    """Every line of `select_tile` at each of its tile heights, with and without splits, at head sizes 16 to 256.

    The kernels of bf16 and fp16 differ in the type of their products and in conversions: one of them takes the splits
    of one line, the other those of the next.
    """
    for fp8 in (False, True):
        for size in (16, 32, 64, 96, 128, 256):
            for rows in (1, 8, 16) if size < 256 else (1, 8):
                for turn, kind in enumerate(("bf16", "fp16")):
                    split = (rows == 8) == bool(turn)
                    yield Attention(kind, size, rows, 4 if split else 1, fp8)
            for splits in (1, 4):
                yield Attention("fp32", size, 3, splits, fp8)
    for size in (64, 128, 256):  # the merge of many splits
        yield Attention("bf16", size, 1, 16, contexts=(700,))
    yield Attention("bf16", 64, 40)  # several row tiles and two mask words


def least_capability(case: Attention) -> int:
    return 89 if case.fp8 else 80


#: What `make test` runs: Hopper's products and an older architecture's, small.
SMALL = (
    (90, Attention("bf16", 64, 16, contexts=(70, 5))),
    (80, Attention("fp16", 32, 8, 2, contexts=(40, 0))),
)
#: What CI runs in addition: each architecture, each kind of page, splits and the merge.
MIDDLE = (
    (90, Attention("bf16", 128, 16)),
    (90, Attention("bf16", 128, 16, fp8=True)),
    (90, Attention("bf16", 128, 1, 4)),
    (90, replace(Attention("fp16", 96, 16), contexts=(33,))),
    (80, Attention("bf16", 128, 16)),
    (89, Attention("bf16", 64, 8, 4, fp8=True)),
    (120, Attention("fp16", 128, 16, fp8=True)),
    (120, Attention("fp32", 64, 3, 4)),
)
