"""Platt scaling of drafter probabilities into acceptance probabilities, fitted on held-out prompts.

A drafted token whose ancestors were all accepted is accepted with a probability whose log-odds are a·logit(p) + b.
a and b depend on the use of the drafter, on the token's distance from the last token of that drafter's context, and on
whether it is the slot's best candidate or a sibling. They are fitted at T = 0 and T = 1, because the target's
distribution is sharper when greedy, and interpolated in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from d2sd.plugins.lookup import CopyScores
from d2sd.plugins.trees import Branches, Draft
from d2sd.policies import DraftUse, UseName
from d2sd.runtime.batch import Batch

# Shape letters: B requests, K branches, S slots, M candidates a slot.

#: Log-probabilities are clamped here: closer to 0, fp32 log-odds are meaningless.
_MAX_LOGPROB = -1e-6


_Line = Sequence[Sequence[float]]


class Lines(NamedTuple):
    """Parameters of a use that takes the best candidates alone, by temperature (0, 1) and distance 1 .. S."""

    slope: _Line
    offset: _Line


@dataclass(frozen=True, slots=True)
class Calibration:
    """Parameters by temperature (0, 1), use of a drafter (`DraftUse`), distance 1 .. S and kind (best, sibling)."""

    slope: Tensor  # [2, U, S, 2] fp32, positive; U uses
    offset: Tensor  # [2, U, S, 2] fp32
    copies: CopyScores | None = None  # None: `default_scores`

    def to(self, device: str) -> Calibration:
        copies = None if self.copies is None else self.copies.to(device)
        return Calibration(self.slope.to(device), self.offset.to(device), copies)

    @staticmethod
    def of(
        slope: list[list[list[list[float]]]],
        offset: list[list[list[list[float]]]],
        copies: Sequence[CopyOdds] | None = None,
        uses: Mapping[UseName, Lines] | None = None,
    ) -> Calibration:
        """Tables of a `CalibrationFile`, by drafter, and the lines of uses by their keys. A use without lines has the
        parameters of the one it is like; a drafter without a row keeps its probabilities.
        """
        told, slots = uses or {}, len(slope[0][0])

        def rows(table: list[list[list[list[float]]]], neutral: float, lines: Mapping[UseName, _Line]) -> Tensor:
            found = torch.full((2, len(DraftUse), slots, 2), neutral)
            found[:, : len(table[0])] = torch.tensor(table)
            for use in DraftUse:
                line = lines.get(use.key)
                found[:, use] = found[:, use.like] if line is None else torch.tensor(line)[..., None]
            return found

        return Calibration(
            rows(slope, 1.0, {key: lines.slope for key, lines in told.items()}),
            rows(offset, 0.0, {key: lines.offset for key, lines in told.items()}),
            None if copies is None else copy_scores(copies, slots),
        )

    def apply(self, draft: Draft, batch: Batch, use: DraftUse, branches: Branches | None = None) -> Draft:
        """Calibrate a draft for its use: a first pass [B, S, M], or a second pass [B, K, S, M] of `branches`.

        Of `Draft.behind` the best candidate is that of each row: behind another parent it may be another one.
        """
        slots, width = draft.tokens.shape[-2:]
        kind = (torch.arange(width, device=draft.tokens.device) > 0).long()
        distance = torch.arange(slots, device=draft.tokens.device)
        if branches is not None:
            distance = (distance - branches.prefix_len[..., None]).clamp(min=0)  # [B, K, S]; kept slots are unused
        weight = batch.sampling.temperature.clamp(0, 1).view(-1, *[1] * (draft.tokens.dim() - 1))

        def straightened(logprob: Tensor, at: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
            slot, kind = at
            ends = (values[:, use][:, slot, kind].unbind(0) for values in (self.slope, self.offset))
            slope, offset = (torch.lerp(greedy, sampled, weight) for greedy, sampled in ends)
            return logsigmoid(slope * logit(logprob) + offset)

        behind = draft.behind
        if behind is not None:
            of_row = (behind < behind.amax(-1, keepdim=True)).long()
            behind = straightened(behind, (distance[..., None, None], of_row), weight[..., None])
        return Draft(draft.tokens, straightened(draft.logprob, (distance[..., None], kind), weight), behind)


def logit(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)) of a log-probability."""
    clamped = logprob.clamp(max=_MAX_LOGPROB)
    return clamped - torch.log(-torch.expm1(clamped))


class CopyOdds(NamedTuple):
    """Log-odds that a copied token is accepted, given that those before it are: the sum of one entry of each."""

    length: Sequence[float]  # by length of the match, `LENGTHS`
    support: Sequence[float]  # by probability of the first draft for the token: none, then by `SUPPORT`
    slot: Sequence[float]  # the last holds on


#: Fitted to 4,292 positions of 72 greedy answers of SmolLM2, to benchmarks/prompts/calibration.jsonl and training
#: prompts.
DEFAULT_ODDS = CopyOdds(
    (-1.13, -0.44, 0.12, 0.46, 0.74, 1.38, 1.62),
    (-1.3, -1.83, -0.83, -0.48, 0.19, 1.4, 2.43, 3.16),
    (0.68, 1.94, 2.32, 2.67, 2.69, 2.69, 2.76),
)


def copy_scores(odds: Sequence[CopyOdds], slots: int) -> CopyScores:
    """Scores of copies from their odds at temperature 0 and 1."""
    tables = []
    for length, support, slot in odds:
        last = [slot[min(n, len(slot) - 1)] for n in range(slots)]
        tables.append(torch.tensor(length)[:, None, None] + torch.tensor(support)[:, None] + torch.tensor(last))
    return CopyScores(logsigmoid(torch.stack(tables)))


@cache
def default_scores(slots: int, device: str) -> CopyScores:
    """Scores of copies where a bundle's calibration has none."""
    return copy_scores([DEFAULT_ODDS, DEFAULT_ODDS], slots).to(device)
