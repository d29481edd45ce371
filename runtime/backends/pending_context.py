"""Committed rows whose K/V a drafter's pages lack yet, because it has not run since.

Features wait until the drafter is about to draft: one product then serves many steps, and what a request that left
would have cost is never paid. On a CPU rows that were padding or have been forgiven are left out of the product; on
CUDA, where to know them is to wait for the device, they are computed and written to page 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from d2sd.modeling.drafter import Drafter
from d2sd.modeling.kv_pool import KVPool

# Shape letters: B requests, T rows, M pages a request, E hidden, n auxiliary layers, R rows of all requests.

#: Rows that are paid in any case, padding counted: what waits takes n·E numbers a row, 12 kB for SmolLM2.
MAX_PENDING_ROWS = 4096


@dataclass(slots=True)
class _Entry:
    features: Tensor  # [B, T, n·E]
    page_table: Tensor  # [B, M]
    positions: Tensor  # [B, T]
    keep: Tensor  # [B, T]
    dropped: set[int] = field(default_factory=set)  # owners that left
    _request_keys: list[int] | None = None

    @property
    def request_keys(self) -> list[int]:
        """First page of each request; nobody on CUDA. Read when first asked for, not inside a step."""
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
            here = torch.tensor([owner not in self.dropped for owner in self.request_keys])
            (chosen,) = (keep & here[of]).nonzero(as_tuple=True)
            of, features, positions, keep = of[chosen], features[chosen], positions[chosen], keep[chosen]
        return features, self.page_table[of], positions[:, None], keep[:, None]


class PendingContext:
    """Those of one drafter, oldest first: they are written in this order, so a page's last owner wins."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.rows = 0  # at most so many

    def push(self, features: Tensor, page_table: Tensor, positions: Tensor, keep: Tensor) -> None:
        """Queue the rows of `positions [B, T]` where `keep [B, T]`.

        The tensors are kept, not copied. A captured step that runs again would overwrite them while they wait: capture
        must then copy them here, or flush inside the graph.
        """
        self._entries.append(_Entry(features, page_table, positions, keep))
        self.rows += keep.numel()

    def drop(self, first_page: int) -> None:
        """Owe nothing more for the request whose first page this was."""
        for entry in self._entries:
            if first_page in entry.request_keys:
                entry.dropped.add(first_page)
        self._entries = [
            entry for entry in self._entries if not entry.request_keys or set(entry.request_keys) - entry.dropped - {0}
        ]
        self.rows = sum(entry.keep.numel() for entry in self._entries)

    def flush(self, drafter: Drafter, pool: KVPool) -> None:
        """Compute all rows in one product and write them."""
        parts = [entry.rows() for entry in self._entries]
        self._entries, self.rows = [], 0
        sizes = [len(features) for features, *_ in parts]
        if not sum(sizes):
            return
        features = torch.cat([part[0] for part in parts])[None]
        positions = torch.cat([part[2] for part in parts]).view(1, -1)
        k, v = drafter.context_keys_values(features, positions)
        for (_, tables, places, keep), keys, values in zip(
            parts, torch.split(k[:, 0], sizes, 1), torch.split(v[:, 0], sizes, 1), strict=True
        ):
            pool.write(keys[:, :, None], values[:, :, None], tables, places, keep)
