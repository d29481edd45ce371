"""Platt scaling: fit a `Calibration` to node outcomes, one logistic regression per drafter, distance and kind."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from d2sd.runtime.observe import NodeOutcome
from d2sd.runtime.speculation.calibration import Calibration, logit
from d2sd.runtime.stats import calibration_error, reliability_bins

#: Weight, in observations, of the prior a = 1, b = 0: it regularises distances that are rarely reached.
PRIOR = 4.0
_MIN_SLOPE = 0.05  # positive, so that calibration keeps the order of confidences
_STEPS = 200


def fit(greedy: Iterable[NodeOutcome], sampled: Iterable[NodeOutcome], slots: int, drafters: int = 2) -> Calibration:
    """Calibration of blocks with `slots` drafts, from node outcomes at T = 0 and at T = 1; `drafters` is its D."""
    slope, offset = torch.ones(2, drafters, slots, 2), torch.zeros(2, drafters, slots, 2)
    for warm, observed in enumerate((greedy, sampled)):
        groups: dict[tuple[int, int, int], list[tuple[float, bool]]] = {}
        for one in observed:
            key = one.drafter, one.distance, int(one.sibling)
            groups.setdefault(key, []).append((one.logprob, one.accepted))
        for key, pairs in groups.items():
            x = logit(torch.tensor([logprob for logprob, _ in pairs], dtype=torch.float64))
            y = torch.tensor([accepted for _, accepted in pairs], dtype=torch.float64)
            drafter, distance, kind = key
            index = warm, drafter, distance, kind
            slope[index], offset[index] = logistic(x, y)
    return Calibration(slope, offset)


def logistic(x: Tensor, y: Tensor) -> tuple[float, float]:
    """a and b that maximise the likelihood of y under sigmoid(a·x + b), with the prior and a >= _MIN_SLOPE."""
    free = _fitted(x, y, torch.tensor([1.0, 0.0], dtype=torch.float64), None)
    slope, offset = free if free[0] >= _MIN_SLOPE else _fitted(x, y, torch.zeros(1, dtype=torch.float64), _MIN_SLOPE)
    return slope, offset


def _fitted(x: Tensor, y: Tensor, prior: Tensor, slope: float | None) -> tuple[float, float]:
    """Solve the convex problem in (a, b), or in b alone at a given slope."""
    weights = prior.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [weights], max_iter=_STEPS, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        search.zero_grad()
        odds = x * (weights[0] if slope is None else slope) + weights[-1]
        misfit = binary_cross_entropy_with_logits(odds, y, reduction="sum")
        total: Tensor = (misfit + PRIOR / 2 * ((weights - prior) ** 2).sum()) / (len(x) + PRIOR)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    found = weights.tolist()
    return found[0] if slope is None else slope, found[-1]


def calibrated(judged: Iterable[NodeOutcome], calibration: Calibration, warm: int) -> list[NodeOutcome]:
    """The nodes with calibrated probabilities; `warm` is 0 for T = 0, 1 for T = 1."""
    found = []
    for one in judged:
        key = warm, one.drafter, one.distance, int(one.sibling)
        odds = calibration.slope[key] * logit(torch.tensor(one.logprob)) + calibration.offset[key]
        found.append(one._replace(logprob=float(logsigmoid(odds))))
    return found


def drafter_error(outcomes: Iterable[NodeOutcome], drafter: int) -> float:
    """Expected calibration error of one drafter's nodes (`DrafterRole`); 0 without any."""
    bins = reliability_bins((one.prob, one.accepted) for one in outcomes if one.drafter == drafter)
    return calibration_error(bins) or 0.0
