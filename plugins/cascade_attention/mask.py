"""The mask among the rows of a pass, and its packed form for the kernels.

    attn_mask[b, t, u]  ->  bit u % 32 of word [b, t, u // 32]

Bits past T are 0. Chunks of prompts have none: a row sees those of its chunk up to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

#: Columns a word.
WORD = 32
#: Counters of a pass: more than a GPU has multiprocessors, which programs of a split context never exceed.
COUNTERS = 1024


@dataclass(frozen=True)
class AttnMask:
    """The mask of one pass, shared by its layers, which run in order: packed once, and only if a kernel runs."""

    allowed: Tensor  # [B, T, T] bool, row t may attend to row u. Every row, padding too, must attend to itself

    @cached_property
    def words(self) -> Tensor:
        """[B, T, ceil(T/32)] int32."""
        return pack_mask_bits(self.allowed)

    @cached_property
    def arrived(self) -> Tensor:
        """As `counters`."""
        return counters(self.allowed.device)


@dataclass(frozen=True)
class ChunkMask:
    """Chunks of B prompts, one behind the other: q, k and v are [1, N, ...], and each chunk is causal."""

    lengths: tuple[int, ...]  # B, rows of each, at least 1
    starts: Tensor  # [B + 1] int64, first row of each, and N

    @cached_property
    def arrived(self) -> Tensor:
        """As `counters`."""
        return counters(self.starts.device)

    def spans(self) -> list[slice]:
        """The rows of each chunk among the N."""
        ends = accumulate(self.lengths)
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]


def counters(device: torch.device) -> Tensor:
    """[COUNTERS] int32, zeros: how many splits of a tile are done. One layer leaves them as the next needs them."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def pack_mask_bits(attn_mask: Tensor) -> Tensor:
    """[B, T, T] bool -> [B, T, ceil(T/32)] int32; on CUDA with Triton in one kernel."""
    if attn_mask.device.type == "cuda" and find_spec("triton") is not None:
        from d2sd.plugins.cascade_attention.triton.launch import pack_mask_triton

        return pack_mask_triton(attn_mask)
    return pack_mask_reference(attn_mask)


def pack_mask_reference(attn_mask: Tensor) -> Tensor:
    """`pack_mask_bits` on any device."""
    padded = F.pad(attn_mask, (0, -attn_mask.shape[2] % WORD))
    bits = padded.view(*attn_mask.shape[:2], -1, WORD).int()
    shifts = torch.arange(WORD, device=attn_mask.device, dtype=torch.int32)
    # Bits are disjoint, so the sum is their union; the highest one is the sign.
    return (bits << shifts).sum(-1, dtype=torch.int32)
