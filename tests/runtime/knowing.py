"""Drafters that know the answers, like those of `cheating.py`, by tensors alone: a graph can capture them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.plugins.choice.reference import philox
from d2sd.plugins.trees import Branches, Draft
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import ModelRunner
from tests.tiny import prepared


class Knowing(ModelRunner):
    """Drafts the text of each request, right at two thirds of the places.

    `texts` is prompt and answer by request seed, below 2^31. Random drafters are almost never right: nothing but the
    anchor would be committed.
    """

    def __init__(
        self, target: Decoder, first: Drafter, second: Drafter, flex: FlexHead, texts: Mapping[int, Sequence[int]]
    ) -> None:
        super().__init__(*prepared(target, first, second, flex))
        longest = max(map(len, texts.values()))
        padded = [[*text, *[0] * (longest - len(text))] for text in texts.values()]
        self._texts = torch.tensor(padded, device=self.device)
        self._seeds = torch.tensor(list(texts), device=self.device)

    @torch.inference_mode()
    def draft_first(self, batch: Batch, width: int, role: DrafterRole = DrafterRole.FIRST) -> Draft:
        right, known = self._known(batch, 0)
        return _told(super().draft_first(batch, width, role), right, known)

    @torch.inference_mode()
    def draft_second(self, batch: Batch, branches: Branches, role: DrafterRole, width: int) -> Draft:
        right, known = (x[:, None] for x in self._known(batch, 1))
        slots = torch.arange(right.shape[-1], device=right.device)
        rejected = (slots == branches.prefix_len[..., None]) & (right == branches.rejected[..., None])
        return _told(super().draft_second(batch, branches, role, width), right, known & ~rejected)

    def _known(self, batch: Batch, salt: int) -> tuple[Tensor, Tensor]:
        """The right tokens [B, S], and at which slots they are drafted."""
        row = (batch.sampling.seed[:, None] == self._seeds).int().argmax(1, keepdim=True)
        place = batch.context_len[:, None] + 1 + torch.arange(self.block_size - 1, device=self._seeds.device)
        right = self._texts[row, place.clamp(max=self._texts.shape[1] - 1)]
        zero = torch.zeros_like(place)
        dice, *_ = philox((zero + batch.sampling.seed[:, None], zero), (place, zero + salt, zero, zero))
        return right, dice % 3 > 0


def _told(draft: Draft, right: Tensor, known: Tensor) -> Draft:
    """The draft with `right` as the best candidate of the `known` slots."""
    right, best = right[..., None].expand_as(draft.tokens[..., :1]), draft.tokens[..., :1]
    others = best.where(draft.tokens == right, draft.tokens)
    told = torch.cat([right, others[..., 1:]], -1)
    return Draft(told.where(known[..., None], draft.tokens), draft.logprob)
