"""Rows that join a pass in its last layers: a block of them behind each of its rows.

    layers before those of `model`   the pass's own rows
    its last layers                  both kinds. The attention of rows that join is `model`'s; norms and feed-forward
                                     networks are those of the pass, which reads them once for all rows

A block sees what its row sees, the row and itself. No other row sees it, so the pass has the same outputs without it.
Its keys and values are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from d2sd.modeling.kv_pool import Chunks, Rows
from d2sd.modeling.layers import Attention, CosSin, KeysValues

if TYPE_CHECKING:
    from d2sd.modeling.inference import InferenceLayers, ServedModel

Compiled = TypeVar("Compiled", bound="InferenceLayers")

# Shape letters: B requests, T rows of the pass, G rows of a block, U = T · G, E hidden.


@dataclass(frozen=True, slots=True)
class Joining:
    """Blocks of rows that join, and the model whose attention they have."""

    model: ServedModel
    x: Tensor  # [E], the input of every row at the first of these layers
    size: int  # G
    layers: int  # of the pass, its last ones

    def compiled(self, kind: type[Compiled]) -> Compiled:
        """The layers of its model, which are of the pass's kind."""
        found = self.model.compiled
        assert isinstance(found, kind), "the caller asks whether it joins"
        return found

    def beside(self, rows: Rows | Chunks) -> Rows:
        """The rows of a pass, then in their order the block behind each: T + U of each request. Not of chunks."""
        assert isinstance(rows, Rows)
        mask, places, size = rows.attn_mask, rows.positions, self.size
        batch, count = places.shape
        slots = torch.arange(1, 1 + size, device=places.device)
        places = torch.cat([places, (places[:, :, None] + slots).flatten(1)], 1)
        wide = mask.new_zeros(batch, places.shape[1], places.shape[1])
        wide[:, :count, :count] = mask
        wide[:, count:, :count].view(batch, count, size, count).copy_(mask[:, :, None])
        wide[:, count:, count:].view(batch, count, size, count, size).diagonal(dim1=1, dim2=3).fill_(True)
        return Rows(places, wide, rows.where, rows.needed)


class JoinedAttention:
    """The attention of a layer over T + U rows of each request, with projections of their own for the last U."""

    def __init__(self, own: Attention, other: Attention, count: int) -> None:
        self._both, self._count = (own, other), count

    def __call__(self, x: Tensor, cos_sin: CosSin, index: int, memory: Any) -> tuple[Tensor, KeysValues]:
        """`Mixer.forward`; the keys and values are those of the first T rows."""

        def split(rows: Tensor) -> Sequence[Tensor]:
            return rows[:, : self._count], rows[:, self._count :]

        made = [
            (one.queries(part, angles), *one.keys_values(part, angles))
            for one, part, *angles in zip(self._both, split(x), *map(split, cos_sin), strict=True)
        ]
        q, k, v = (torch.cat(both, 1) for both in zip(*made, strict=True))
        heads = split(memory(index, q, k, v, sinks=self._both[0].sinks))
        out = torch.cat([one.output(part) for one, part in zip(self._both, heads, strict=True)], 1)
        return out, KeysValues(*made[0][1:])
