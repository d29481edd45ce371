"""The pages of those layers of a pool that are found by one page table."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from d2sd.plugins.kv_pages import write_pages

# Shape letters: B requests, T rows of each, L layers, P pages, Z tokens a page, Hkv heads, D head size.

#: Scales of FP8 pages, (k, v), [L] fp32 each; (): the pages are not FP8.
Scales = tuple[Tensor, Tensor] | tuple[()]


class PagePart(NamedTuple):
    """Pages of the layers of a pool that have one page table."""

    layers: tuple[int, ...]  # of the model, ascending
    table: int  # the place of their page table in `Where.tables`
    k: Tensor  # [L', P, Z, Hkv, D]
    v: Tensor
    scales: Scales

    def of(self, x: Tensor) -> Tensor:
        """x [L, ...] of all layers -> [L', ...] of these; a view where the layers are evenly spaced."""
        if len(x) == len(self.layers):
            return x
        steps = {after - before for before, after in zip(self.layers, self.layers[1:], strict=False)}
        if len(steps) > 1:
            return torch.stack([x[layer] for layer in self.layers])
        return x[self.layers[0] : self.layers[-1] + 1 : min(steps, default=1)]

    def write(
        self, k: Tensor, v: Tensor, table: Tensor, positions: Tensor, keep: Tensor, path: Tensor | None = None
    ) -> None:
        """Commit these layers' rows of k, v [L, B, T, Hkv, D]; the other arguments are those of `write_pages`."""
        scales = self.scales or (None, None)
        write_pages(self.of(k), self.of(v), self.k, self.v, table, positions, keep, path, *scales)

    def between(self, first: int, stop: int) -> PagePart:
        """The same memory of the layers first .. stop - 1, counted from `first`."""
        some = slice(bisect_left(self.layers, first), bisect_left(self.layers, stop))
        scales: Scales = () if not self.scales else (self.scales[0][some], self.scales[1][some])
        layers = tuple(layer - first for layer in self.layers[some])
        return PagePart(layers, self.table, self.k[some], self.v[some], scales)
