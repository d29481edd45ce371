"""Deferred drafter-KV injection.

Target features of committed tokens are queued and projected to K/V in one batched GEMM right before the drafter runs.
One GEMM then covers many steps, and finished requests cost nothing. On CPU, padding and finished requests are dropped
from the queue; on CUDA that would need a device sync, so their K/V go to the scratch page 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from d2sd.modeling.drafter import DraftModel
from d2sd.modeling.kv_pool import KVPool

# Shape letters: B requests, T rows, M pages a request, E hidden, n auxiliary layers, R rows of all requests.

#: Queued rows, padding included, at which the queue is flushed: a row holds n·E numbers, 12 kB for SmolLM2.
MAX_PENDING_ROWS = 4096


@dataclass(slots=True)
class _Entry:
    features: Tensor  # [B, T, n·E]
    page_table: Tensor  # [B, M]
    positions: Tensor  # [B, T]
    keep: Tensor  # [B, T]
    dropped: set[int] = field(default_factory=set)  # first pages of finished requests
    _request_keys: list[int] | None = None

    @property
    def request_keys(self) -> list[int]:
        """First page of each request; empty on CUDA. Read lazily, never inside a step."""
        if self._request_keys is None:
            first = self.page_table[:, 0]
            self._request_keys = first.tolist() if first.device.type == "cpu" else []
        return self._request_keys

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row by row: features [R, n·E], page tables [R, M], positions [R, 1], keep [R, 1]."""
        batch, count = self.keep.shape
        of = torch.arange(batch, device=self.keep.device).repeat_interleave(count)
        features, positions, keep = self.features.flatten(0, 1), self.positions.flatten(), self.keep.flatten()
        if self.request_keys:
            live = torch.tensor([key not in self.dropped for key in self.request_keys])
            (chosen,) = (keep & live[of]).nonzero(as_tuple=True)
            of, features, positions, keep = of[chosen], features[chosen], positions[chosen], keep[chosen]
        return features, self.page_table[of], positions[:, None], keep[:, None]


class PendingContext:
    """The queue of one drafter, oldest first: K/V is written in this order, so a page keeps its last owner's."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.rows = 0  # upper bound: padding is counted

    def push(self, features: Tensor, page_table: Tensor, positions: Tensor, keep: Tensor) -> None:
        """Queue the rows of `positions [B, T]` where `keep [B, T]`.

        The tensors are kept, not copied. A captured step that runs again would overwrite them before the flush, so
        capture must copy them here or flush inside the graph.
        """
        self._entries.append(_Entry(features, page_table, positions, keep))
        self.rows += keep.numel()

    def drop(self, first_page: int) -> None:
        """Drop queued rows of the request that owned `first_page`."""
        for entry in self._entries:
            if first_page in entry.request_keys:
                entry.dropped.add(first_page)
        self._entries = [
            entry for entry in self._entries if not entry.request_keys or set(entry.request_keys) - entry.dropped - {0}
        ]
        self.rows = sum(entry.keep.numel() for entry in self._entries)

    def flush(self, drafter: DraftModel, pool: KVPool) -> None:
        """Compute the K/V of all rows in one GEMM and write it to the pages."""
        parts = [entry.rows() for entry in self._entries]
        self._entries, self.rows = [], 0
        sizes = [len(features) for features, *_ in parts]
        if not sum(sizes):
            return
        features = torch.cat([part[0] for part in parts])[None]
        positions = torch.cat([part[2] for part in parts]).view(1, -1)
        k, v = drafter.context_keys_values(features, positions)
        for (_, tables, at, keep), keys, values in zip(
            parts, torch.split(k[:, 0], sizes, 1), torch.split(v[:, 0], sizes, 1), strict=True
        ):
            pool.write(keys[:, :, None], values[:, :, None], tables, at, keep)
