"""Every term and every weighting against loops over its formula, and their gradients against finite differences."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from d2sd.train.objectives.head import HeadStats
from d2sd.train.objectives.loss import chain, objective, slot_weights
from d2sd.train_recipe import Objective

# Shape letters: A blocks, G block size γ, C candidate ids.

TERMS = ("ce", "kl", "tv", "nla", "lk", "focal", "chain")
SLOT_TERMS = TERMS[:5]
WEIGHTINGS = [
    Objective(slots="uniform", ce=1),
    Objective(slots="decay", decay=2.5, ce=1),
    Objective(slots="dpace", smoothing=0.5, ce=1),
    Objective(slots="dpace", smoothing=0.0, ce=1),
]
NAMES = ["uniform", "decay", "dpace", "dpace, not smoothed"]
Logits = list[list[list[float]]]  # [A][G][C]


class Blocks(NamedTuple):
    """Five blocks of four slots over six ids: wrong at once, later, never, cut by the end, and with all of it shown."""

    drafter: Tensor  # logits [A, G, C], float64
    target: Tensor  # the same
    labels: Tensor  # [A, G]
    visible: Tensor  # [A]
    used: Tensor  # [A, G] bool

    def stats(self, drafter: Tensor) -> HeadStats:
        log_q, log_p = drafter.log_softmax(-1), self.target.log_softmax(-1)
        return HeadStats(
            log_q.gather(-1, self.labels[..., None])[..., 0],
            -(log_p.exp() * log_q).sum(-1),
            torch.minimum(log_p.exp(), log_q.exp()).sum(-1),
            -(log_p.exp() * log_p).sum(-1),
            drafter.argmax(-1),
        )


def blocks() -> Blocks:
    draw = torch.Generator().manual_seed(0)
    drafter, target = 1.5 * torch.randn(2, 5, 4, 6, generator=draw, dtype=torch.float64)
    labels = drafter.argmax(-1)
    other = drafter.argmin(-1)
    for block, slot in ((0, 1), (0, 2), (1, 0), (1, 3), (2, 1), (3, 0), (3, 2), (3, 3)):
        labels[block, slot] = other[block, slot]
    visible = torch.tensor([1, 2, 2, 1, 4])
    inside = torch.ones(5, 4, dtype=torch.bool)
    inside[3, 2:] = False  # the end of a sequence: the drafter is right where it counts
    used = (torch.arange(4) >= visible[:, None]) & inside
    return Blocks(drafter, target, labels, visible, used)


# --- The formulas, in Python's own floats ----------------------------------------------------------------------------


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(z) for z in row]
    return [power / sum(powers) for power in powers]


def weight(kind: Objective, q: list[float], slots: list[int], shown: int, slot: int) -> float:
    """Return the weight of one slot; q [G] of the labels, `slots` the used ones of the block."""
    if kind.slots == "uniform":
        return 1.0
    if kind.slots == "decay":
        return math.exp(-(slot - shown) / kind.decay)
    a = kind.smoothing
    return sum(math.prod(a + (1 - a) * q[i] for i in slots if i <= k) for k in slots if k >= slot)


def slot_term(name: str, p: list[float], q: list[float], label: int, frozen: list[float]) -> float:
    """`frozen` is q where the formula takes it for a constant."""
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    overlap = sum(map(min, p, q))
    share = math.exp(-3 * sum(map(min, p, frozen)))
    return {
        "ce": -math.log(q[label]),
        "kl": kl,
        "tv": 1 - overlap,
        "nla": -math.log(overlap),
        "lk": share * kl + (1 - share) * (1 - overlap),
    }[name]


def by_loops(name: str, kind: Objective, given: Blocks, drafter: Logits, frozen: Logits) -> float:
    """One term of the loss. `drafter` moves what is differentiated, `frozen` gives weights, λ and guesses."""
    above = below = 0.0
    labels: list[list[int]] = given.labels.tolist()
    target: Logits = given.target.tolist()
    for block, used in enumerate(given.used.tolist()):
        slots = [slot for slot in range(4) if used[slot]]
        if not slots:
            continue
        q = [softmax(row)[label] for row, label in zip(drafter[block], labels[block], strict=True)]
        held = [softmax(row)[label] for row, label in zip(frozen[block], labels[block], strict=True)]
        if name == "chain":
            above += 1 - sum(math.prod(q[j] for j in slots if j <= k) for k in slots) / len(slots)
            below += 1
            continue
        wrong = [s for s in slots if frozen[block][s][labels[block][s]] < max(frozen[block][s])]
        for slot in wrong[:1] if name == "focal" else slots:
            share = weight(kind, held, slots, int(given.visible[block]), slot)
            p, now = softmax(target[block][slot]), softmax(drafter[block][slot])
            kept = softmax(frozen[block][slot])
            term = slot_term("ce" if name == "focal" else name, p, now, labels[block][slot], kept)
            above += share * term
            below += 1 / len(slots) if kind.slots == "dpace" and name != "focal" else share  # D-PACE: a block each
    return above / below


def only(kind: Objective, name: str) -> Objective:
    """The weighting with that one term, beside a slot term where the schema wants one."""
    return kind.model_copy(update={"ce": 0.0} | {name: 1.0})


@pytest.mark.parametrize("kind", WEIGHTINGS, ids=NAMES)
@pytest.mark.parametrize("name", TERMS)
def test_terms_equal_their_formulas(name: str, kind: Objective) -> None:
    given = blocks()
    logits: Logits = given.drafter.tolist()
    found = objective(given.stats(given.drafter), given.labels, given.visible, given.used, only(kind, name))
    assert list(found) == [name], "what has no weight is not computed"
    assert float(found[name]) == pytest.approx(by_loops(name, kind, given, logits, logits), rel=1e-6)


@pytest.mark.parametrize("kind", WEIGHTINGS, ids=NAMES)
@pytest.mark.parametrize("name", TERMS)
def test_gradients_equal_central_differences(name: str, kind: Objective) -> None:
    """The differences are of the loops; weights, λ and guesses, which are detached, are held where they were."""
    given = blocks()
    moved = given.drafter.clone().requires_grad_()
    value = objective(given.stats(moved), given.labels, given.visible, given.used, only(kind, name))[name]
    (gradient,) = torch.autograd.grad(value, moved)
    assert not gradient[~given.used].any()
    assert gradient.any()
    frozen: Logits = given.drafter.tolist()
    for block, slot in given.used.nonzero().tolist():
        for place in range(6):
            ends = []
            for step in (1e-5, -1e-5):
                nudged = given.drafter.clone()
                nudged[block, slot, place] += step
                ends.append(by_loops(name, kind, given, nudged.tolist(), frozen))
            assert float(gradient[block, slot, place]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-8)


# --- What the docstring says -----------------------------------------------------------------------------------------


def test_unsmoothed_dpace_weights_are_the_gradient_of_chain() -> None:
    given = blocks()
    log_q = given.stats(given.drafter).log_q.requires_grad_()
    (gradient,) = torch.autograd.grad(chain(log_q, given.used), log_q)
    weights = slot_weights(log_q.detach(), given.visible, given.used, Objective(slots="dpace", smoothing=0, ce=1))
    slots = given.used.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(gradient, weights / slots / int(given.used.any(1).sum()))


# --- Extremes --------------------------------------------------------------------------------------------------------


EVERYTHING = dict.fromkeys(TERMS, 1.0)


@pytest.mark.parametrize("kind", WEIGHTINGS, ids=NAMES)
@pytest.mark.parametrize("log_q", [0.0, -300.0, -1e30], ids=["certain", "saturated", "impossible"])
def test_extremes_stay_finite(log_q: float, kind: Objective) -> None:
    """fp32, the label certain or out of reach, no overlap at all."""
    leaf = torch.full((2, 4), log_q, requires_grad=True)
    overlap = torch.full((2, 4), float(log_q == 0), requires_grad=True)
    labels, used = torch.zeros(2, 4, dtype=torch.long), torch.tensor([[False, True, True, True]] * 2)
    stats = HeadStats(leaf, -leaf, overlap, torch.zeros(2, 4), labels + 1)
    found = objective(stats, labels, torch.ones(2, dtype=torch.long), used, kind.model_copy(update=EVERYTHING))
    assert set(found) == set(TERMS)
    assert all(torch.isfinite(value) for value in found.values())
    for gradient in torch.autograd.grad(torch.stack(list(found.values())).sum(), [leaf, overlap]):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", WEIGHTINGS, ids=NAMES)
def test_blocks_without_a_slot_to_learn_from_teach_nothing(kind: Objective) -> None:
    given = blocks()
    moved = given.drafter.clone().requires_grad_()
    used = torch.zeros_like(given.used)
    found = objective(given.stats(moved), given.labels, given.visible, used, kind.model_copy(update=EVERYTHING))
    assert all(float(found[name].detach()) == 0 for name in SLOT_TERMS)
    (gradient,) = torch.autograd.grad(torch.stack(list(found.values())).sum(), moved)
    assert not gradient.any()


def test_a_chain_over_whole_blocks_counts_every_slot_the_same() -> None:
    log_q = torch.log(torch.tensor([[1.0, 0.5, 0.5, 0.5], [1.0, 1.0, 1.0, 0.5]]))
    used = torch.tensor([[False, True, True, True], [False, False, False, True]])
    assert float(chain(log_q, used)) == pytest.approx(((0.5 + 0.25 + 0.125) / 3 + 0.5) / 2)
    assert float(chain(log_q, used, whole=True)) == pytest.approx((0.5 + 0.25 + 0.125 + 0.5) / 3 / 2)
