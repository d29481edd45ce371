"""The recurrent states of all requests, which some layers have instead of keys and values.

A request has one state in each of these layers, found by its state id. State 0 is that before any token: it stays zero,
and padding has it. Rows of a tree leave the states as they are, and return what a commit of some of them needs
(`StateRows`). Rows of prompts are all committed, so each layer advances their states at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import Self

from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule import last_rows

if TYPE_CHECKING:
    from d2sd.modeling.kv_pool import Chunks, Rows
    from d2sd.modeling.mixers.configs import RecurrentConfig, StateShape

# Shape letters: B requests, T rows of each, L layers with a state, P states, G longest path.


@dataclass(frozen=True)
class StateRows:
    """Rows that may be committed, as they change the states of one layer [B, T, ...], or of all [L, B, T, ...]."""

    tensors: tuple[Tensor, ...]  # of `RecurrentConfig.rows`

    @classmethod
    def empty(cls, shapes: Iterable[StateShape], rows: Sequence[int], like: Tensor) -> Self:
        """Room for rows [...] of this shape, in the type and on the device of a tensor."""
        fp32 = torch.float32
        return cls(tuple(like.new_empty(*rows, *size, dtype=fp32 if wide else like.dtype) for size, wide in shapes))

    @classmethod
    def stack(cls, layers: Sequence[Self]) -> Self:
        """Join the rows of each layer into those of all."""
        return cls(tuple(map(torch.stack, zip(*(layer.tensors for layer in layers), strict=True))))

    def layer(self, index: int) -> Self:
        """A view of one layer's of all."""
        return type(self)(tuple(tensor[index] for tensor in self.tensors))

    def commit(self, pool: StatePool, state_ids: Tensor, path: Tensor, count: Tensor) -> None:
        """Advance the states of all layers along each request's accepted path.

        state_ids [B], path [B, G], count [B]: as `slots`, `path` and `count` of
        `d2sd.plugins.delta_rule.commit_delta_rule`. The bits depend on the tokens alone, not on how many are committed
        at once.
        """
        raise NotImplementedError


class StatePool:
    """States of all layers. Layers are counted among those with a state."""

    def __init__(self, config: RecurrentConfig, count: int, dtype: torch.dtype, device: str) -> None:
        #: All memory: a tensor [L, P, ...] for each part of `RecurrentConfig.states`.
        self.tensors = [
            torch.zeros(len(config.layers), count, *size, dtype=torch.float32 if wide else dtype, device=device)
            for size, wide in config.states
        ]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Overwrite the states `target` [N] by `source` [N]; from state 0, a request begins."""
        for states in self.tensors:
            states[:, target] = states[:, source]


class StatePass:
    """The states of all layers as the rows of one pass read them."""

    def __init__(
        self, pool: StatePool, rows: Rows | Chunks, *, exact: bool = False, mask: AttnMask | ChunkMask | None = None
    ) -> None:
        """`exact` as of `d2sd.plugins.delta_rule.tree_delta_rule`. `mask`: that of the rows, which attention reads as
        well; None: it is made here.
        """
        self._pool, own = pool, rows.attn_mask
        self.mask = mask or (own if isinstance(own, ChunkMask) else AttnMask(own))
        where = rows.where
        assert where.state_ids is not None or not where.pages.shape[1], "requests with pages have states"
        self.ids = torch.zeros_like(where.context_len) if where.state_ids is None else where.state_ids  # [B]
        # Compiled or not, the recurrence is the form on a CPU: plain decoding and speculation have the same bits.
        self.exact = exact or pool.tensors[0].device.type == "cpu"
        self._last: tuple[Tensor, Tensor] | None = None

    def of(self, layer: int) -> list[Tensor]:
        """The states of a layer, a tensor [P, ...] for each part."""
        return [tensor[layer] for tensor in self._pool.tensors]

    def last_rows(self, chunks: ChunkMask, size: int, rows: int) -> tuple[Tensor, Tensor]:
        """See `d2sd.plugins.delta_rule.last_rows`; made once for all layers."""
        if self._last is None:
            self._last = last_rows(chunks, size, rows)
        return self._last
