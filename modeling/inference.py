"""Models that serve, and the layers they serve with: compiled CPU kernels or fused CUDA ones.

Such layers replace a model's PyTorch layers, from which they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from d2sd.modeling.kv_pool import Chunks, CommittedRows, KVPool, Rows
from d2sd.modeling.layers import Layer, RMSNorm, Rotary, TokenRows
from d2sd.modeling.product import Product
from d2sd.modeling.state_pool import StateRows
from d2sd.plugins.layer_ops import Front

# Shape letters: B requests, T rows, N rows of chunks, C context rows, E hidden, L layers, Hkv K/V heads, D head size.


#: The fields of `DecoderOutput`; of a drafter's graph the first alone.
LayerOutputs = (
    tuple[Tensor]
    | tuple[Tensor, Tensor, Tensor, Tensor]
    | tuple[Tensor, Tensor, Tensor, Tensor, StateRows | None, Tensor | None]
)


class InferenceLayers(nn.Module):
    """All layers of a model and its last norm."""

    #: Read pages by one page table: graphs take no second.
    one_page_table: ClassVar[bool] = False
    #: Products and attention are batch-invariant on CUDA.
    exact: bool = False

    @property
    def products(self) -> Sequence[Product]:
        """The products for which a form can be chosen."""
        return ()

    @property
    def kv_scales(self) -> tuple[Tensor, Tensor] | None:
        """Scales of FP8 pages, (k, v), [L] fp32 each; None where the pages are not FP8."""
        return None

    def input_of(self, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor | TokenRows:
        """The input for tokens [B, T]: embeddings, or tokens and the table where the layers look embeddings up."""
        return embed(tokens)

    def forward(
        self, x: Any, rotary: Rotary, rows: Rows | Chunks, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> LayerOutputs:
        """x [B, T, E], of chunks [1, N, E], as `input_of` gives it -> the fields of `DecoderOutput`."""
        raise NotImplementedError

    def keys_values(self, projected: Tensor, norm: RMSNorm, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        """projected [B, C, E], before `norm` -> rotated keys and values of every layer [L, B, C, Hkv, D].

        Drafters' layers only.
        """
        raise NotImplementedError


class ContextLayers(InferenceLayers):
    """Layers of a drafter whose products take rows of context together with those of a draft."""

    def with_context(
        self,
        context: CommittedRows,
        front: Front,
        x: Tensor | TokenRows,
        rotary: Rotary,
        rows: Rows,
        pool: KVPool,
        *,
        block: int = 0,
        head: Product | None = None,
    ) -> Tensor:
        """Write the keys and values of `context` to its pages, and draft over them; each weight is read once.

        `front` are its features behind `fc`; x [A, U, E] at `rows`, of any requests, or its
        tokens -> hidden states [A, U, E]. With `block`, all but the first of each `block` rows; with `head`, as that
        product takes its input: in FP8, where it is.
        """
        raise NotImplementedError


class ServedModel(nn.Module):
    """A target or a drafter. Whole as it is loaded; one that serves has its layers packed or fused, or a graph."""

    compiled: InferenceLayers | None  # in place of `layers`
    layers: nn.ModuleList  # of PyTorch's modules; a graph has none
    norm: RMSNorm  # the last one
    #: Reads pages by one page table, as `InferenceLayers.one_page_table`.
    one_page_table: ClassVar[bool] = False
    #: Prepared for inference (`d2sd.modeling.prepare`): it can only serve.
    served: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_module("compiled", None)

    @property
    def own_layers(self) -> Sequence[Layer]:
        """PyTorch's layers; none of a graph, or where compiled ones have replaced them."""
        return cast("Sequence[Layer]", self._modules.get("layers") or ())

    @property
    def is_plain(self) -> bool:
        """Whether it has PyTorch's layers alone, and compiled ones can replace them."""
        return self.compiled is None and len(self.own_layers) > 0 and all(layer.compiles for layer in self.own_layers)

    def replace_layers(self, layers: InferenceLayers) -> None:
        """Put `layers` in place of the model's own."""
        self.compiled = layers
        self.layers = nn.ModuleList()
