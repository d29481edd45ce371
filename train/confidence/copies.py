"""Fit the probability that a copied token is accepted: an additive logistic model, as of `CopyOdds`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from d2sd.plugins.lookup import LENGTHS, SUPPORT
from d2sd.runtime.observe import CopyOutcome
from d2sd.runtime.speculation.calibration import DEFAULT_ODDS, CopyOdds

#: Weight of the prior, `DEFAULT_ODDS`, for every entry.
_PRIOR = 1.0
_STEPS = 200


def fit_copies(outcomes: Sequence[CopyOutcome], slots: int) -> CopyOdds:
    """The odds of copies of up to `slots` tokens that are likeliest to accept what was accepted.

    Entries without an outcome stay where the prior has them.
    """
    length, support, slot = DEFAULT_ODDS
    held = [slot[min(n, len(slot) - 1)] for n in range(slots)]
    prior = torch.tensor([*length, *support, *held], dtype=torch.float64)
    if not outcomes:
        return _odds(prior, slots)
    numbers = torch.tensor([outcome[:3] for outcome in outcomes])
    entries = numbers + torch.tensor([0, len(LENGTHS), len(LENGTHS) + len(SUPPORT) + 2])
    accepted = torch.tensor([outcome.accepted for outcome in outcomes], dtype=torch.float64)
    weights = prior.clone().requires_grad_()
    search = torch.optim.LBFGS([weights], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        misfit = binary_cross_entropy_with_logits(weights[entries].sum(-1), accepted, reduction="sum")
        total: Tensor = (misfit + _PRIOR / 2 * ((weights - prior) ** 2).sum()) / len(accepted)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    return _odds(weights.detach(), slots)


def _odds(weights: Tensor, slots: int) -> CopyOdds:
    parts = torch.split(weights, [len(LENGTHS), len(SUPPORT) + 2, slots])
    return CopyOdds(*(part.round(decimals=4).tolist() for part in parts))
