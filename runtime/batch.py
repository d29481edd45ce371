"""The requests of one decode step, as the executors and the policies see them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from d2sd.runtime.sampling.sample import Sampling

# Shape letters: B requests, M pages a request (both buckets).


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows past the last request are padding and are never committed."""

    anchor: Tensor  # [B] int64
    page_table: Tensor  # [B, M] int64
    context_len: Tensor  # [B] int64, the anchor's position
    active: Tensor  # [B] bool
    sampling: Sampling
