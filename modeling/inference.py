"""The interface of the layers that a model serves with: compiled CPU kernels or fused CUDA ones."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from d2sd.modeling.kv_pool import KVPool
from d2sd.modeling.layers import RMSNorm
from d2sd.modeling.rope import Rotary
from d2sd.modeling.rows import Chunks, CommittedRows, Rows

# Shape letters: B requests, T rows, N rows of chunks, C context rows, E hidden, L layers, Hkv K/V heads, D head size.


class InferenceLayers(Protocol):
    """All layers of a model and its last norm."""

    @property
    def kv_scales(self) -> tuple[Tensor, Tensor] | None:
        """Of FP8 pages, (k, v), [L] fp32 each; None where the pages are not FP8."""

    def __call__(
        self, x: Tensor, rotary: Rotary, rows: Rows | Chunks, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, E], of chunks [1, N, E] -> the fields of `DecoderOutput`."""

    def keys_values(self, projected: Tensor, norm: RMSNorm, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        """projected [B, C, E], before `norm` -> rotated keys and values of every layer [L, B, C, Hkv, D].

        Drafters' layers only.
        """


@runtime_checkable
class JointLayers(InferenceLayers, Protocol):
    """Layers that FlexDraft's mask rows can join."""

    def with_masks(
        self, x: Tensor, mask: Tensor, draft: InferenceLayers, rotary: Rotary, rows: Rows, behind: Rows, pool: KVPool,
        aux_layer_ids: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """A target's pass in which FlexDraft's mask rows join the last layers, with the attention of `draft`.

        x [B, T, E] are the target's own rows, at `rows`; mask [E] is the input of every mask row. `behind` has the
        positions of both kinds, [B, T + masks]. The fields of `DecoderOutput`: hidden states of both kinds, the rest of
        the target's own rows.
        """


@runtime_checkable
class ContextLayers(InferenceLayers, Protocol):
    """A drafter's layers whose products take rows of context together with those of a draft."""

    def with_context(
        self, context: CommittedRows, projected: Tensor, norm: RMSNorm, x: Tensor, rotary: Rotary, rows: Rows,
        pool: KVPool,
    ) -> Tensor:  # fmt: skip
        """Write the keys and values of `context` to its pages, and draft over them; each weight is read once.

        projected [B·T, E] are its features behind `fc`, before `norm`; x [A, U, E] at `rows`, of any requests -> hidden
        states [A, U, E].
        """
