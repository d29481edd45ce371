"""Arguments of these ops: parameters of layers whose heads `qk_norm_rope` makes, and rows of a pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Shape letters: B requests, T rows of each, C rows of context, E hidden, L layers, Hq/Hkv heads, D head size.


@dataclass(frozen=True, slots=True)
class Heads:
    """Geometry, and parameters of L layers. None: the model has no such thing."""

    queries: int  # Hq, 0 where only keys and values are made
    kv: int  # Hkv
    size: int  # D
    eps: float
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [L, D]
    bias: Tensor | None = None  # [L, (Hq + 2·Hkv)·D], where the product has not added it
    scales: Tensor | None = None  # [L, 3] fp32, of the FP8 sums of q, k and v
    k_scale: Tensor | None = None  # [L] fp32, of FP8 pages
    v_scale: Tensor | None = None
    rotary: int | None = None  # of a head, its first numbers, which rotate; None: all D
    gated: bool = False  # behind each query is a gate [D] in the product, which `gate_heads` reads
    norm_offset: bool = False  # norms are times 1 + weight, and rounded once

    @property
    def parts(self) -> list[int]:
        """Columns of q, k and v in the product; those of q have gates between them."""
        queries = self.queries * (2 if self.gated else 1)
        return [queries * self.size, self.kv * self.size, self.kv * self.size]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the first B·T rows of a product go, of one layer: context that a drafter injects as it drafts."""

    k_pages: Tensor  # [P, Z, Hkv, D], contiguous; FP8 where the heads have `k_scale`
    v_pages: Tensor
    page_table: Tensor  # [B, M] int64
    positions: Tensor  # [B, T] int64, the token that each row is
    keep: Tensor  # [B, T] bool; no row is written where it is false or past the page table


@dataclass(frozen=True, slots=True)
class Behind:
    """Positions that count from a start of each request: kernels add them as they read them."""

    start: Tensor  # [B] int64
    steps: Tensor  # [B, T] int64, may be broadcast over the requests

    @property
    def absolute(self) -> Tensor:
        """[B, T] int64."""
        return self.start[:, None] + self.steps


@dataclass(frozen=True, slots=True)
class Front:
    """Rows of context that a pass has before its own, which have a norm of their own and no embeddings."""

    x: Tensor  # [C, E], contiguous
    weight: Tensor  # [E], of their norm
    positions: Tensor  # [...] int64, C of them
