"""A pass over fused layers: its results besides hidden states, and the arguments that its layers share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.kv_pool import Chunks, CommittedRows, KVPool, Rows
from d2sd.modeling.layers import TokenRows
from d2sd.modeling.product import Product
from d2sd.modeling.state_pool import StatePass, StateRows
from d2sd.plugins.layer_ops import Front, Heads, qk_norm_rope

# Shape letters: B requests, T rows, R = B·T or rows of chunks, E hidden, Hq/Hkv query and K/V heads, D head size, n
# auxiliary layers.


def numbers(x: Tensor | TokenRows) -> Tensor:
    """A tensor of the type and on the device of an input."""
    return x.table if isinstance(x, TokenRows) else x


@dataclass(frozen=True, slots=True)
class Shared:
    """Arguments of all layers of a pass."""

    cos: Tensor  # [R, D/2], or half of what rotates
    sin: Tensor
    attend: Callable[..., Tensor]  # `KVPool.attend`
    states: StatePass | None


class Pass:
    """Outputs of a pass over x [B, T, E], besides hidden states."""

    joint: Tensor | None = None  # the inputs of qkv products, where they are to be; None: anywhere
    normed: Tensor | None = None  # its rows of the pass

    def __init__(
        self, body: BodyConfig, x: Tensor | TokenRows, rows: Rows | Chunks, aux_layer_ids: tuple[int, ...]
    ) -> None:
        shape, width, x = x.shape[:2], body.hidden_size, numbers(x)
        layers = len(body.attention_layers)
        self.k, self.v = x.new_empty(2, layers, *shape, body.num_kv_heads, body.head_dim).unbind()
        self.features = x.new_empty(*shape, len(aux_layer_ids) * width)
        # The residual stream after a layer is written where it is wanted: a column of `features`, or one buffer.
        lines = self.features.flatten(0, 1)
        self.columns = {layer: lines[:, i * width : (i + 1) * width] for i, layer in enumerate(aux_layer_ids)}
        self._written: StateRows | None = None
        self._is_tree = isinstance(rows, Rows)  # chunks are committed layer by layer, so one layer's rows are enough
        if body.recurrent is not None:
            count = len(body.recurrent.layers) if self._is_tree else 1
            self._written = body.recurrent.code.rows.empty(body.recurrent.rows, (count, *shape), x)

    @property
    def front(self) -> Front | None:
        """Rows that a qkv product has before those of the pass."""
        return None

    @property
    def states(self) -> StateRows | None:
        """Rows of all layers with a state, which a commit needs."""
        return self._written if self._is_tree else None

    def state_rows(self, index: int) -> StateRows:
        """Where layer `index` of those with a state puts what its rows write into it."""
        assert self._written is not None
        return self._written.layer(index if self._is_tree else 0)

    def heads(
        self, index: int, heads: Heads, product: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, Hq, D], keys and values [B, T, Hkv, D] of the rows, from the qkv product of a layer."""
        k, v = self.k[index], self.v[index]
        q = qk_norm_rope(product[None], cos, sin, heads, k.flatten(0, 1)[None], v.flatten(0, 1)[None])
        return q.view(*k.shape[:2], *q.shape[1:]), k, v


class PassWithContext(Pass):
    """A pass whose qkv products begin with rows of context; their K/V is in the pages before the layer attends."""

    def __init__(
        self,
        body: BodyConfig,
        x: Tensor | TokenRows,
        context: CommittedRows,
        front: Front,
        pool: KVPool,
        first: Product,
    ) -> None:
        """`front`: the rows of `context`; `first`: the qkv product of the first layer."""
        self._committed, self._front, self._pool, self._shape = context, front, pool, x.shape[:2]
        self._count = len(front.x)
        rows = self._count + math.prod(self._shape)
        self.joint = cast("Tensor", first.room(rows))  # inputs of the qkv products, which are of one shape
        self.normed = self.joint[self._count :]
        self.k, self.v = (
            numbers(x).new_empty(2, 1, rows, body.num_kv_heads, body.head_dim).unbind()
        )  # of one layer at a time
        self.columns = {}

    @property
    def front(self) -> Front:
        return self._front

    def heads(
        self, index: int, heads: Heads, product: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        paged = self._pool.paged(index, self._committed)
        q = qk_norm_rope(product[None], cos, sin, heads, self.k, self.v, paged)
        own = (rows[self._count :].view(*self._shape, *rows.shape[1:]) for rows in (q, self.k[0], self.v[0]))
        own_q, own_k, own_v = own
        return own_q, own_k, own_v
