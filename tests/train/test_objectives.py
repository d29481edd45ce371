"""Weights, prefixes and the loss, each against its formula written out."""

from __future__ import annotations

import math

import pytest
import torch

from d2sd.train.objectives import draw_prefixes, first_errors, slot_weights, soft_cross_entropy


def test_weights_by_hand() -> None:
    """1 at the first slot to predict, e^(-1/4) a slot less from there on, 0 on what is visible."""
    found = slot_weights(torch.tensor([1, 3, 4]), 4, 4.0)
    expected = [[0, 1, math.exp(-1 / 4), math.exp(-2 / 4)], [0, 0, 0, 1], [0, 0, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("base", [0.9, 0.5])
def test_prefixes_follow_their_distribution(base: float) -> None:
    count, size = 20_000, 8
    drawn = draw_prefixes(count, size, base, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == set(range(1, size))
    weights = [base**n for n in range(1, size)]
    statistic = sum(
        (int((drawn == n).sum()) - count * w / sum(weights)) ** 2 / (count * w / sum(weights))
        for n, w in enumerate(weights, 1)
    )
    assert statistic < 27.9  # chi-square with 6 degrees of freedom exceeds it once in 10,000


def test_first_errors() -> None:
    tokens = torch.tensor([[5, 6, 7, 8]] * 5)
    drafted = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8], [5, 0, 7, 8], [5, 6, 7, 0], [5, 6, 0, 0]])
    assert first_errors(drafted, tokens).tolist() == [4, 4, 1, 3, 2]  # slot 0 is the anchor, whatever is drafted there


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


@pytest.mark.parametrize("hard", [0.0, 0.3, 1.0])
def test_loss_equals_its_formula_and_so_does_its_gradient(hard: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator).mul_(2).requires_grad_()
    target, labels = 2 * torch.randn(5, 7, generator=generator), torch.tensor([0, 6, 3, 3, 1])
    loss = soft_cross_entropy(logits, target, labels, hard)
    gradient = torch.autograd.grad(loss.sum(), logits)[0]
    for i in range(5):
        q, p = softmax(logits[i].tolist()), softmax(target[i].tolist())
        label = [(1 - hard) * p[c] + hard * (c == int(labels[i])) for c in range(7)]
        expected = -sum(a * math.log(b) for a, b in zip(label, q, strict=True))
        assert float(loss[i].detach()) == pytest.approx(expected, rel=1e-5)
        assert gradient[i].tolist() == pytest.approx([b - a for a, b in zip(label, q, strict=True)], abs=1e-6)


def test_gradient_of_the_soft_loss_is_that_of_the_divergence_from_the_target() -> None:
    """KL(target ‖ drafter) by central differences."""
    generator = torch.Generator().manual_seed(1)
    logits, target = torch.randn(2, 6, generator=generator)
    p = softmax(target.tolist())

    def divergence(index: int, step: float) -> float:
        moved = logits.tolist()
        moved[index] += step
        return sum(a * math.log(a / b) for a, b in zip(p, softmax(moved), strict=True))

    logits.requires_grad_()
    soft_cross_entropy(logits, target, torch.tensor(2), 0.0).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    numeric = [(divergence(i, 1e-4) - divergence(i, -1e-4)) / 2e-4 for i in range(6)]
    assert logits.grad.tolist() == pytest.approx(numeric, abs=1e-5)


@pytest.mark.parametrize("hard", [0.0, 0.3])
def test_a_forbidden_token_leaves_loss_and_gradient_finite(hard: float) -> None:
    logits = torch.tensor([[0.5, 1.0, -1.0, 0.0]], requires_grad=True)
    forbidden = logits + torch.tensor([0, 0, float("-inf"), 0])
    loss = soft_cross_entropy(forbidden, torch.tensor([[1.0, 2.0, 3.0, 0.0]]), torch.tensor([1]), hard)
    gradient = torch.autograd.grad(loss.sum(), logits)[0][0]
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[2] == 0
    assert gradient[1] < 0  # towards the likeliest token that is left
    p, q = softmax([1.0, 2.0, 3.0, 0.0]), softmax([0.5, 1.0, 0.0])
    soft = -sum(p[c] * math.log(q[i]) for i, c in enumerate((0, 1, 3)))
    assert float(loss.detach()) == pytest.approx((1 - hard) * soft - hard * math.log(q[1]), rel=1e-5)
