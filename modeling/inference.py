"""The interface of the layers that a model serves with: compiled CPU kernels or fused CUDA ones.

They replace a model's PyTorch layers, from which they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.kv_pool import Chunks, CommittedRows, KVPool, Rows
from d2sd.modeling.layers import RMSNorm, Rotary, TokenRows
from d2sd.modeling.product import Product
from d2sd.modeling.state_pool import StateRows

# Shape letters: B requests, T rows, N rows of chunks, C context rows, E hidden, L layers, Hkv K/V heads, D head size.


#: The fields of `DecoderOutput`.
LayerOutputs = tuple[Tensor, Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor, StateRows | None]


class InferenceLayers(Protocol):
    """All layers of a model and its last norm."""

    @property
    def kv_scales(self) -> tuple[Tensor, Tensor] | None:
        """Scales of FP8 pages, (k, v), [L] fp32 each; None where the pages are not FP8."""

    def __call__(
        self, x: Any, rotary: Rotary, rows: Rows | Chunks, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> LayerOutputs:
        """x [B, T, E], of chunks [1, N, E], as `input_of` gives it -> the fields of `DecoderOutput`."""

    def keys_values(self, projected: Tensor, norm: RMSNorm, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        """projected [B, C, E], before `norm` -> rotated keys and values of every layer [L, B, C, Hkv, D].

        Drafters' layers only.
        """


@runtime_checkable
class ContextLayers(InferenceLayers, Protocol):
    """Layers of a drafter whose products take rows of context together with those of a draft."""

    def with_context(
        self,
        context: CommittedRows,
        projected: Tensor,
        norm: RMSNorm,
        x: Tensor | TokenRows,
        rotary: Rotary,
        rows: Rows,
        pool: KVPool,
        *,
        block: int = 0,
        head: Product | None = None,
    ) -> Tensor:
        """Write the keys and values of `context` to its pages, and draft over them; each weight is read once.

        projected [B·T, E] are its features behind `fc`, before `norm`; x [A, U, E] at `rows`, of any requests, or its
        tokens -> hidden states [A, U, E]. With `block`, all but the first of each `block` rows; with `head`, as that
        product takes its input: in FP8, where it is.
        """


def input_of(layers: InferenceLayers | None, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor | TokenRows:
    """The input of `layers` for tokens [B, T]: those and the table, where they look embeddings up; else embeddings."""
    # Subclasses of nn.Embedding do more than look up.
    if getattr(layers, "takes_tokens", False) and type(embed) is nn.Embedding:
        return TokenRows(tokens, embed.weight.detach())
    return embed(tokens)


def takes_one_table(model: nn.Module) -> bool:
    """Whether all layers of the model must have the pages of one table: graphs take no second."""
    forms = model, getattr(model, "compiled", None)
    return any(getattr(form, "one_page_table", False) for form in forms)


class _HasBody(Protocol):
    @property
    def body(self) -> BodyConfig:
        """Geometry of the layers."""


class PlainModel(Protocol):
    """A target or drafter whose layers are PyTorch's."""

    config: _HasBody
    layers: nn.ModuleList
    norm: RMSNorm
    compiled: InferenceLayers | None

    def modules(self) -> Iterator[nn.Module]:
        """All modules below it, and itself."""


def plain(model: nn.Module) -> PlainModel | None:
    """The model, if it has PyTorch layers that nothing replaces yet, and that compiled ones can replace."""
    layers = getattr(model, "layers", ())
    is_plain = len(layers) > 0 and getattr(model, "compiled", None) is None
    compiles = all(getattr(layer, "compiles", True) for layer in layers)
    return cast("PlainModel", model) if is_plain and compiles else None


def replace_layers(model: PlainModel, layers: InferenceLayers) -> None:
    """Put `layers` in place of the model's own, which go unless the model `keeps_layers`."""
    model.compiled = layers
    if not getattr(model, "keeps_layers", False):
        model.layers = nn.ModuleList()
