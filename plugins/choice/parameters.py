"""The sampling parameters of a batch that the choice of tokens reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """One value a request; the flags choose between static variants.

    A subclass may also change the logits, by the text (`changes_logits`): then no kernel chooses.
    """

    temperature: Tensor  # [B] fp32, 0 where greedy
    top_p: Tensor  # [B] fp32, infinite where off
    top_k: Tensor  # [B] int64, V where off
    min_p: Tensor  # [B] fp32, 0 where off
    seed: Tensor  # [B] int64
    any_sampled: bool
    any_top_p: bool
    any_top_k: bool
    any_min_p: bool

    @property
    def any_filter(self) -> bool:
        return self.any_top_p or self.any_top_k or self.any_min_p

    def with_filters(self, on: bool) -> Self:
        """The same values with the static variants of all filters, or of none."""
        return replace(self, any_top_p=on, any_top_k=on, any_min_p=on)

    @property
    def is_argmax(self) -> bool:
        """Whether the target's choice is the argmax of its logits, for every request and wherever in a tree."""
        return not self.any_sampled and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        return False

    def change_at(self, logits: Tensor, context_len: Tensor, tokens: Tensor) -> Tensor:
        """Drafted logits [B, ...] of `tokens` [B, ...], changed by the tokens committed so far."""
        return logits
