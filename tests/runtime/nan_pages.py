"""Runners whose scratch page is full of NaN."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.where import Where
from d2sd.plugins.trees import Accepted
from d2sd.runtime.batch import Batch, Prefilled
from d2sd.runtime.model_runner import ModelRunner, Verified
from tests.runtime.helpers import afterwards, poison


class NaNScratch(ModelRunner):
    """Page 0, where padding writes, holds NaN after every write."""

    def allocate(self, sizes: PoolSizes) -> None:
        super().allocate(sizes)
        afterwards(self.context, "inject", lambda *given: poison(self, 0))

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], where: Where, following: Tensor | None = None
    ) -> Prefilled:
        found = super().prefill(tokens, lengths, where, following)
        poison(self, 0)
        return found

    def commit(self, batch: Batch, verified: Verified, accepted: Accepted) -> None:
        super().commit(batch, verified, accepted)
        poison(self, 0)
