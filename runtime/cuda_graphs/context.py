"""The context that a captured step commits, in memory that keeps its address.

    decode_step -> commit -> features of the accepted tokens -> here -> inject_and_draft of the next captured step

A drafter makes keys and values of it in the same products as its next draft, which read its weights once. The next
step may serve other requests: rows have the page table they were committed with. What it does not take
(`PendingContext.leave`) is copied into the drafters' queues before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from d2sd.modeling.rows import CommittedRows

# Shape letters: B requests, T rows of each, G block size γ, M pages a request, n·E features of a row.


class StaticContext:
    """Of up to `requests` requests of `pages` pages, G rows each."""

    @torch.inference_mode(False)
    def __init__(
        self, requests: int, pages: int, block_size: int, width: int, page_size: int, dtype: torch.dtype, device: str
    ) -> None:
        places = torch.zeros(requests, block_size, dtype=torch.long, device=device)
        self._whole = CommittedRows(
            features=torch.zeros(*places.shape, width, dtype=dtype, device=device),
            page_table=torch.zeros(requests, pages, dtype=torch.long, device=device),
            positions=places, keep=torch.zeros_like(places, dtype=torch.bool), page_size=page_size,
        )  # fmt: skip

    @property
    def tensors(self) -> list[Tensor]:
        return self._whole.tensors

    def rows(self, requests: int) -> CommittedRows:
        """Of the first requests, all G rows of each: shapes do not depend on the policy of the step before."""
        return self.part(requests, self._whole.keep.shape[1])

    def part(self, requests: int, length: int) -> CommittedRows:
        """Of the first requests, the first T = `length` rows of each."""
        features, page_table, positions, keep = (tensor[:requests] for tensor in self.tensors)
        return CommittedRows(
            features[:, :length], page_table, positions[:, :length], keep[:, :length], self._whole.page_size
        )

    @torch.inference_mode()
    def store(self, committed: CommittedRows) -> None:
        """Store what a step has committed."""
        requests, length = committed.keep.shape
        if length < self._whole.keep.shape[1]:
            self._whole.keep[:requests, length:].zero_()
        for slot, tensor in zip(self.part(requests, length).tensors, committed.tensors, strict=True):
            slot.copy_(tensor)

    @torch.inference_mode()
    def clear(self) -> None:
        """Keep no row."""
        self._whole.keep.zero_()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Steps that run inside find no rows, and do not change those that are here."""
        before = [tensor.clone() for tensor in self.tensors]
        self.clear()
        try:
            yield
        finally:
            for tensor, value in zip(self.tensors, before, strict=True):
                tensor.copy_(value)
