"""Runners whose pools are full of NaN: on the scratch page, or wherever no request or cached prefix is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.where import Where
from d2sd.plugins.trees import Accepted, Tree
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch, Prefilled
from d2sd.runtime.model_runner import ModelRunner, Verified
from tests.runtime.cheating import CheatingRunner
from tests.runtime.helpers import afterwards, poison, poison_what_is_given_up


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


class NaNPages(NaNScratch, CheatingRunner):
    """All pages hold NaN until they are written, and again when they are given up."""

    def allocate(self, sizes: PoolSizes) -> None:
        super().allocate(sizes)
        poison_what_is_given_up(self)

    def verify(self, batch: Batch, tree: Tree, *, padded: bool = False) -> Verified:
        verified = super().verify(batch, tree, padded=padded)
        assert not verified.logits.isnan().any()
        return verified

    def _draft(self, role: DrafterRole, batch: Batch, blocks: Tensor) -> tuple[Tensor, Tensor]:
        logits, hidden = super()._draft(role, batch, blocks)
        assert not logits.isnan().any()
        return logits, hidden
