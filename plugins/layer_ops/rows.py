"""Rows of a pass as `embed_norm_rope` takes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Shape letters: B requests, T rows of each, C rows of context, E hidden.


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
