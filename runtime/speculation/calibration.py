"""From what a drafter says to what happens: log-odds of acceptance, straightened on held-out prompts.

A drafted token, given that all before it in its path were accepted, is accepted with a probability whose log-odds are
a·logit(p) + b (Platt scaling). a and b depend on the drafter, on the distance of the token from the last one that
drafter was shown, and on whether it is the slot's best candidate or a sibling. Fitted at T = 0 and T = 1: the target's
choice is sharper when greedy; between, parameters are interpolated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from d2sd.runtime.batch import Batch
from d2sd.runtime.speculation.draft import Branches, Draft

# Shape letters: B requests, K branches, S slots, M candidates a slot.

#: Closer to certainty fp32 log-odds say nothing.
_CERTAIN = -1e-6


@dataclass(frozen=True, slots=True)
class Calibration:
    """Parameters by temperature (0, 1), drafter (first, second), distance 1 .. S and kind (best, sibling)."""

    slope: Tensor  # [2, 2, S, 2] fp32, positive
    offset: Tensor  # [2, 2, S, 2] fp32

    def to(self, device: str) -> Calibration:
        return Calibration(self.slope.to(device), self.offset.to(device))

    @staticmethod
    def of(slope: list[list[list[list[float]]]], offset: list[list[list[list[float]]]]) -> Calibration:
        return Calibration(torch.tensor(slope), torch.tensor(offset))

    def apply(self, draft: Draft, batch: Batch, drafter: int, branches: Branches | None = None) -> Draft:
        """What drafter 0 or 1 said, straightened: a first pass [B, S, M], or one [B, K, S, M] behind `branches`."""
        slots, width = draft.tokens.shape[-2:]
        kind = (torch.arange(width, device=draft.tokens.device) > 0).long()
        distance = torch.arange(slots, device=draft.tokens.device)
        if branches is not None:
            distance = (distance - branches.prefix_len[..., None]).clamp(min=0)  # [B, K, S]; kept slots mean nothing
        warm = batch.sampling.temperature.clamp(0, 1).view(-1, *[1] * (draft.tokens.dim() - 1))

        def chosen(values: Tensor) -> Tensor:
            cold, hot = values[:, drafter][:, distance[..., None], kind].unbind(0)
            return torch.lerp(cold, hot, warm)

        odds = chosen(self.slope) * logit(draft.logprob) + chosen(self.offset)
        return Draft(draft.tokens, logsigmoid(odds))


def uncalibrated(draft: Draft, batch: Batch, drafter: int, branches: Branches | None = None) -> Draft:
    """In place of `Calibration.apply`: probabilities stay the drafter's own."""
    return draft


def logit(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)) of a log-probability."""
    sure = logprob.clamp(max=_CERTAIN)
    return sure - torch.log(-torch.expm1(sure))
