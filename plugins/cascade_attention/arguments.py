"""The arguments of cascade attention: the committed context of a pass's requests, the mask of its rows, and chunks of
prompts in place of one: a row sees those of its chunk up to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.plugins.dispatch import op

# Shape letters: B requests, P pages in the pool, T new rows, Z tokens a page, M pages a request, Hkv K/V heads, D head
# size.

OP = "attention"
#: Columns a word of a packed mask.
WORD = 32
#: Counters of a pass: more than a GPU has multiprocessors, which programs of a split context never exceed.
COUNTERS = 1024


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Committed keys and values of B requests, in the pages of one layer."""

    k_pages: Tensor  # [P, Z, Hkv, D], the whole pool of the layer, contiguous
    v_pages: Tensor  # [P, Z, Hkv, D]
    page_table: Tensor  # [B, M] int64 or int32, page of each Z tokens; past the context any page in [0, P)
    context_len: Tensor  # [B] int64 or int32, committed tokens, at most M·Z
    k_scale: Tensor | None = None  # 0-dim fp32, of FP8 (E4M3) pages only
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.fp8 == (self.k_scale is not None) == (self.v_scale is not None), "only FP8 pages have scales"

    @property
    def fp8(self) -> bool:
        """Whether the pages hold E4M3 numbers."""
        return self.k_pages.dtype == torch.float8_e4m3fn


@dataclass(frozen=True)
class AttnMask:
    """The mask of one pass, shared by its layers, which run in order: packed once, and only if a kernel runs."""

    allowed: Tensor  # [B, T, T] bool, row t may attend to row u. Every row, padding too, must attend to itself
    #: [B, T] int64, the first position of the context that each row sees; None: 0. At most the context's length plus
    #: the row's depth: of new rows `allowed` alone says which it sees.
    first: Tensor | None = None
    window: int | None = None  # most positions of the context that a row sees; None: all
    counters: Tensor | None = None  # `arrived` of a pool, which its passes share
    packed: Tensor | None = None  # `words`, where they are known: they may be broadcast over the requests

    @cached_property
    def words(self) -> Tensor:
        """[B, T, ceil(T/32)] int32."""
        return pack_mask_bits(self.allowed) if self.packed is None else self.packed.contiguous()

    @cached_property
    def order(self) -> Tensor:
        """[B, T, T + 2] int32 for the kernel of `exact`: the columns that each row sees, in their order, at T how many,
        and at T + 1 its leader: the last row that sees these first.

        In a tree the n-th of them is the key at position context_len + n. The other numbers are undefined.
        """
        from d2sd.plugins.cascade_attention.triton.exact import key_order

        return key_order(self.allowed)

    @cached_property
    def arrived(self) -> Tensor:
        """Zeroed split counters, shared by the layers of a pass."""
        return counters(self.allowed.device) if self.counters is None else self.counters


def allowed_of(attn_mask: Tensor | AttnMask) -> Tensor:
    """[B, T, T] bool of a mask, which is that, or has it."""
    return attn_mask if isinstance(attn_mask, Tensor) else attn_mask.allowed


@op(OP, loaded=True)
def pack_mask_bits(attn_mask: Tensor) -> Tensor:
    """[B, T, T] bool -> [B, T, ceil(T/32)] int32: attn_mask[b, t, u] is bit u % 32 of word [b, t, u // 32]; bits past T
    are 0.
    """
    padded = F.pad(attn_mask, (0, -attn_mask.shape[2] % WORD))
    bits = padded.view(*attn_mask.shape[:2], -1, WORD).int()
    shifts = torch.arange(WORD, device=attn_mask.device, dtype=torch.int32)
    # Bits are disjoint, so the sum is their union; the highest one is the sign.
    return (bits << shifts).sum(-1, dtype=torch.int32)


@dataclass(frozen=True)
class ChunkMask:
    """Chunks of B prompts, one behind the other: q, k and v are [1, N, ...], and each chunk is causal."""

    lengths: tuple[int, ...]  # B, rows of each; (N,), where only the device knows them (`known`)
    starts: Tensor  # [B + 1] int64, first row of each, and N
    #: [N] int64, the first position that each row sees, of its context and its chunk; None: 0.
    first: Tensor | None = None
    window: int | None = None  # most positions that a row sees; None: all

    @cached_property
    def arrived(self) -> Tensor:
        """Zeroed split counters, shared by the layers of a pass."""
        return counters(self.starts.device)

    @property
    def known(self) -> bool:
        """Whether the host knows the chunks. Where it does not, as in a graph, some may be empty."""
        return len(self.lengths) == len(self.starts) - 1

    def spans(self) -> list[slice]:
        """The rows of each chunk among the N."""
        ends = accumulate(self.lengths)
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def alone(
        self, q: Tensor, k: Tensor, v: Tensor, context: PagedContext
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, PagedContext]]:
        """The rows [1, n, ...] and the context of each prompt, one after the other."""
        for request, span in enumerate(self.spans()):
            row = slice(request, request + 1)
            prompt_context = replace(context, page_table=context.page_table[row], context_len=context.context_len[row])
            yield q[:, span], k[:, span], v[:, span], prompt_context


def move_broken(k: Tensor, v: Tensor) -> None:
    """Make values [..., D] that are not finite 0, and their keys NaN, in place.

    A key that a row does not see has the weight 0, which times NaN is NaN; its score is hidden whatever it is.
    """
    broken = ~v.abs().amax(-1, keepdim=True).isfinite()
    k.masked_fill_(broken, torch.nan)
    v.masked_fill_(broken, 0)


def counters(device: torch.device) -> Tensor:
    """[COUNTERS] int32, zeros: how many splits of a tile are done. One layer leaves them as the next needs them."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
