"""Graphs run beside the models they were made of, on the same inputs: how far apart they are while they serve."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from d2sd.errors import BuildError
from d2sd.modeling.decoder import Decoder, DecoderOutput
from d2sd.modeling.drafter import Drafter
from d2sd.modeling.kv_pool import KVPool
from d2sd.modeling.rows import Rows
from d2sd.runtime.backends.exported import GraphDecoder, GraphDrafter, Session
from d2sd.runtime.backends.model_runner import ModelRunner


@dataclass(slots=True)
class ErrorStats:
    """Of one model's outputs, by name."""

    of: str  # the model
    largest: dict[str, float] = field(default_factory=dict)  # |graph - model|
    scale: dict[str, float] = field(default_factory=dict)  # |model|, its largest

    def compare(self, name: str, found: Tensor, expected: Tensor) -> None:
        """Keep the largest difference seen. Raises `BuildError` where only the model's numbers are finite.

        A target without drafters has features of no layer: nothing to compare.
        """
        if not expected.numel():
            return
        if expected.isfinite().all() and not found.isfinite().all():
            raise BuildError(
                f"The graph of {self.of} gives numbers that are not finite, and its model does not.", where=name,
                fix="this is a bug in d2sd: report it",
            )  # fmt: skip
        apart = (found.float() - expected.float()).abs().max().item()
        self.largest[name] = max(self.largest.get(name, 0.0), apart)
        self.scale[name] = max(self.scale.get(name, 0.0), expected.float().abs().max().item())

    def relative(self) -> dict[str, float]:
        """Largest difference as a share of the output's largest number; 0 where there is none."""
        return {name: apart and apart / max(self.scale[name], 1e-30) for name, apart in self.largest.items()}


class ShadowDecoder(GraphDecoder):
    """A target's graph, whose outputs are served, and the target."""

    def __init__(self, target: Decoder, aux_layer_ids: tuple[int, ...], session: Session) -> None:
        super().__init__(target, aux_layer_ids, session)
        self._plain, self.errors = target, ErrorStats("target")
        self.length: Tensor | None = None  # [B] rows that are of a text; all of them where None

    def forward(self, tokens: Tensor, rows: Rows, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()) -> DecoderOutput:
        out = super().forward(tokens, rows, pool, aux_layer_ids)
        plain = self._plain(tokens, rows, pool, self._aux_layer_ids)
        real = _real(rows)
        if self.length is not None:
            real = real & (torch.arange(tokens.shape[1]) < self.length[:, None])
        self.errors.compare("hidden", out.hidden[real], plain.hidden[real])
        self.errors.compare("features", out.features[real], plain.features[real])
        self.errors.compare("k", out.k[:, real], plain.k[:, real])
        self.errors.compare("v", out.v[:, real], plain.v[:, real])
        return out


class ShadowRunner(ModelRunner):
    """Over a `ShadowDecoder`, which it tells how much of a prefill chunk is text."""

    target: ShadowDecoder

    def prefill(self, tokens: Tensor, length: Tensor, page_table: Tensor, context_len: Tensor) -> None:
        self.target.length = length
        super().prefill(tokens, length, page_table, context_len)
        self.target.length = None


class ShadowDrafter(GraphDrafter):
    """A drafter's graph, whose outputs are served, and the drafter."""

    def __init__(self, drafter: Drafter, session: Session, page_size: int, name: str) -> None:
        super().__init__(drafter, session, page_size)
        self._plain, self.errors = drafter, ErrorStats(name)

    def draft(self, embedded: Tensor, rows: Rows, pool: KVPool) -> Tensor:
        hidden = super().draft(embedded, rows, pool)
        real = _real(rows)
        self.errors.compare("hidden", hidden[real], self._plain.draft(embedded, rows, pool)[real])
        return hidden

    def context_keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().context_keys_values(features, positions)
        for name, found, expected in zip(
            "kv", (k, v), self._plain.context_keys_values(features, positions), strict=True
        ):
            self.errors.compare(name, found, expected)
        return k, v


def _real(rows: Rows) -> Tensor:
    """[B, T] bool: not what fills up a batch, which has page 0, nobody's. Out of any text, half precision is chaos."""
    return (rows.page_table[:, :1] != 0).expand_as(rows.positions)
