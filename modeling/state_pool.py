"""The states of gated delta nets, of all requests: those layers have them instead of keys and values.

    recurrent     [L, P, Hv, Dk, Dv] fp32
    convolution   [L, P, C, W - 1]   the last committed inputs of the short convolution, in the model's type

A request has one of both, found by its state id. State 0 is that before any token: it stays zero, and padding has it.
Rows of a tree leave the states as they are, and return what a commit of some of them needs (`StateRows`). Rows of
prompts are all committed, so each layer advances their states at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from d2sd.modeling.config import DeltaConfig
from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule import (
    DeltaRows,
    chunk_convolution,
    chunk_delta_rule,
    commit_chunk_inputs,
    commit_convolution,
    commit_delta_rule,
    last_rows,
    tree_convolution,
    tree_delta_rule,
)
from d2sd.plugins.gated_layers import DeltaHeads, delta_inputs

if TYPE_CHECKING:
    from d2sd.modeling.kv_pool import Chunks, Rows

# Shape letters: B requests, T rows of each, L gated delta nets, P states, Hk/Hv heads of keys and values, Dk/Dv their
# sizes, C channels and W taps of the convolution, G longest path.


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows that may be committed: `DeltaRows` of one layer, [B, T, ...] each, or of all, [L, B, T, ...]."""

    inputs: Tensor  # of the convolution, [B, T, C]
    delta: DeltaRows

    @staticmethod
    def stack(layers: Sequence[StateRows]) -> StateRows:
        """Join the rows of each layer into those of all."""
        fields = zip(*(_fields(layer) for layer in layers), strict=True)
        inputs, *delta = (torch.stack(field) for field in fields)
        return StateRows(inputs, DeltaRows(*delta))

    @staticmethod
    def empty(delta: DeltaConfig, shape: Sequence[int], like: Tensor) -> StateRows:
        """Room for rows [...] of this shape, in the type and on the device of a tensor."""
        k, v = (delta.key_heads, delta.key_size), (delta.value_heads, delta.value_size)
        inputs, new_k, new_v, beta = (like.new_empty(*shape, *size) for size in ((delta.channels,), k, v, v[:1]))
        return StateRows(inputs, DeltaRows(new_k, new_v, torch.empty_like(beta, dtype=torch.float32), beta))

    def layer(self, index: int) -> StateRows:
        """A view of one layer's of all."""
        inputs, *delta = (field[index] for field in _fields(self))
        return StateRows(inputs, DeltaRows(*delta))


def _fields(rows: StateRows) -> tuple[Tensor, ...]:
    delta = rows.delta
    return rows.inputs, delta.k, delta.v, delta.g, delta.beta


class StatePool:
    """States of all layers. Layers are counted among the gated delta nets."""

    def __init__(self, delta: DeltaConfig, count: int, dtype: torch.dtype, device: str) -> None:
        layers = len(delta.layers)
        heads = delta.value_heads, delta.key_size, delta.value_size
        self.recurrent = torch.zeros(layers, count, *heads, dtype=torch.float32, device=device)
        self.convolution = torch.zeros(layers, count, delta.channels, delta.taps - 1, dtype=dtype, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """All memory."""
        return [self.recurrent, self.convolution]

    @property
    def count(self) -> int:
        """Number of states, state 0 included."""
        return self.recurrent.shape[1]

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's state in all layers."""
        return sum(tensor[:, 0].nbytes for tensor in self.tensors)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Overwrite the states `target` [N] by `source` [N]; from state 0, a request begins."""
        for states in self.tensors:
            states[:, target] = states[:, source]

    def commit(self, rows: StateRows, state_ids: Tensor, path: Tensor, count: Tensor) -> None:
        """Advance the states along each request's accepted path.

        rows: of all layers, from a pass over these requests. state_ids [B], path [B, G], count [B]: as `slots`, `path`
        and `count` of `d2sd.plugins.delta_rule.commit_delta_rule`. The bits depend on the tokens alone, not on how many
        are committed at once.
        """
        commit_delta_rule(rows.delta, self.recurrent, state_ids, path, count)
        commit_convolution(rows.inputs, self.convolution, state_ids, path, count)

    def of(self, rows: Rows | Chunks, *, exact: bool = False, mask: AttnMask | ChunkMask | None = None) -> StatePass:
        """The states for a pass over `rows`; `exact` as of `d2sd.plugins.delta_rule.tree_delta_rule`.

        `mask`: theirs, which attention reads as well; None: it is made here.
        """
        return StatePass(self, rows, exact=exact, mask=mask)


class StatePass:
    """The states of all layers as the rows of one pass read them."""

    def __init__(self, pool: StatePool, rows: Rows | Chunks, *, exact: bool, mask: AttnMask | ChunkMask | None) -> None:
        self._pool, own = pool, rows.attn_mask
        self._mask = mask or (own if isinstance(own, ChunkMask) else AttnMask(own))
        where = rows.where
        assert where.state_ids is not None or not where.pages.shape[1], "requests with pages have states"
        self._ids = torch.zeros_like(where.context_len) if where.state_ids is None else where.state_ids
        # Compiled or not, the recurrence is the form on a CPU: plain decoding and speculation have the same bits.
        self._exact = exact or pool.recurrent.device.type == "cpu"
        self._last: tuple[Tensor, Tensor] | None = None  # of chunks, the rows whose inputs are kept

    def convolved(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """silu of the convolution of x [B, T, C], of chunks [1, N, C], by weight [C, W]."""
        states = self._pool.convolution[layer]
        if isinstance(self._mask, AttnMask):
            return tree_convolution(x, weight, states, self._ids, self._mask)
        return chunk_convolution(x, weight, states, self._ids, self._mask)

    def inputs(self, layer: int, product: Tensor, gates: Tensor, heads: DeltaHeads, into: StateRows) -> Tensor:
        """Queries [B, T, Hk, Dk] from the joint products of a layer, whose other results `into` receives; see
        `d2sd.plugins.gated_layers.delta_inputs`.
        """
        states, rows = self._pool.convolution[layer], (into.inputs, into.delta)
        q = delta_inputs(product, gates, heads, states, self._ids, self._mask, *rows)
        if not isinstance(self._mask, AttnMask):
            if self._last is None:  # once for all layers
                self._last = last_rows(self._mask, states.shape[-1], into.inputs.shape[1])
            commit_chunk_inputs(into.inputs, states, self._ids, self._last)
        return q

    def outputs(self, layer: int, q: Tensor, rows: DeltaRows) -> Tensor:
        """q [B, T, Hk, Dk] and what its rows write -> [B, T, Hv, Dv]."""
        states = self._pool.recurrent[layer]
        if isinstance(self._mask, AttnMask):
            return tree_delta_rule(q, rows, states, self._ids, self._mask, exact=self._exact)
        return chunk_delta_rule(q, rows, states, self._ids, self._mask, exact=self._exact)
