"""The kernels of branches against the functions of the runtime that specify them, which tests/plugins/trees/ holds
against loops.

Exponentials and logarithms of the specification are the correctly rounded ones here, as in the interpreter; where
kernels are compiled a score may differ in its last digits. Everything else is equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from d2sd.plugins.trees import Branches, Draft, chain_branches, merged_branches, restart_blocks, tree_branches
from d2sd.runtime.decode import sources_of
from tests.plugins.kernels.calls import INTERPRETED
from tests.plugins.kernels.trees import assert_equal, both, specification, stable_topk

__all__ = ["specification", "stable_topk"]
#: Slots, branches, node budget, vocabulary: all merge and few do; more room than nodes, and less.
SIZES = (
    (5, 3, 13, 2),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((1, 1, 3, 1), (4, 4, 5, 3), (7, 2, 40, 2), (15, 4, 64, 3), (6, 7, 1, 2), (8, 5, 130, 4))
    ),
)


def round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The specification's exponentials and logarithms, which PyTorch rounds to one of two neighbours."""

    def once(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: function(x.double()).float()

    monkeypatch.setattr(Tensor, "exp", once(Tensor.exp))
    monkeypatch.setattr(torch, "expm1", once(torch.expm1))
    monkeypatch.setattr(torch, "log", once(torch.log))


def confidences(draw: torch.Generator, *shape: int) -> Tensor:
    """Requests of any kind, with ties, certain of everything, without a proposal, in this order, and again."""
    values = (torch.randn(shape, generator=draw) * 2).abs().neg()
    values *= 10.0 ** torch.randint(-8, 1, shape, generator=draw)
    values = values.masked_fill(torch.rand(shape, generator=draw) < 0.125, float("-inf"))
    values = values.masked_fill(torch.rand(shape, generator=draw) < 0.125, 0.0)
    ties = torch.randint(0, 3, shape, generator=draw) / -2
    values[1::4] = ties[1::4]
    values[2::4] = 0.0
    values[3::4] = float("-inf")
    return values


def drafted(draw: torch.Generator, slots: int, count: int, vocab: int) -> tuple[Draft, Branches, Draft]:
    """Draw five requests. Slices, as a draft of several candidates gives them; most branches keep the first draft's."""
    tokens = torch.randint(0, vocab, (5, slots, 2), generator=draw)
    first = Draft(tokens, confidences(draw, 5, slots, 2))
    kept = tokens[:, None, :, 0].expand(-1, count, -1)
    if count > 1:
        kept = torch.where(torch.rand(kept.shape, generator=draw) < 0.9, kept, vocab)
    length = torch.randint(0, slots + 1, (5, count), generator=draw)
    second = torch.randint(0, vocab, (5, count, slots, 1), generator=draw)
    branches = Branches(kept, length, torch.full_like(length, -1))
    return first, branches, Draft(second, confidences(draw, 5, count, slots, 1))


@pytest.mark.parametrize("slots", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 15, 16))])
@pytest.mark.parametrize("width", [1, 2])
def test_boundaries(slots: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    round_once(monkeypatch)
    draw = torch.Generator().manual_seed(slots)
    tokens = torch.randint(0, 99, (9, slots, width), generator=draw)
    first = Draft(tokens, confidences(draw, 9, slots, width))
    for count in sorted({1, slots // 2 + 1, slots}):
        assert_equal(*both(monkeypatch, chain_branches, first, count))


@pytest.mark.parametrize(
    ("slots", "count", "width"),
    [
        (5, 3, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1, 1), (2, 2, 3), (15, 4, 4), (15, 30, 2))),
    ],
)
def test_restarts(slots: int, count: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind nodes on the best chain and beside it; fewer nodes than branches where nothing is proposed."""
    round_once(monkeypatch)
    draw = torch.Generator().manual_seed(slots)
    tokens = torch.randint(0, 99, (9, slots, width), generator=draw)
    first = Draft(tokens, confidences(draw, 9, slots, width).sort(-1, descending=True).values)
    anchor = torch.arange(9)
    assert_equal(*both(monkeypatch, tree_branches, anchor, first, count))


@pytest.mark.parametrize(("slots", "count", "budget", "vocab"), SIZES)
def test_branches(slots: int, count: int, budget: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    round_once(monkeypatch)
    for seed in range(2):
        drafts = drafted(torch.Generator().manual_seed(seed), slots, count, vocab)
        anchor = torch.arange(5) + 7
        expected, found = both(monkeypatch, merged_branches, anchor, sources_of(*drafts), budget)
        if not INTERPRETED:
            torch.testing.assert_close(found.score.cpu(), expected.score, rtol=1e-6, atol=1e-6)
            found.score.copy_(expected.score)
        assert_equal(expected, found)


def test_a_draft_that_is_certain_has_no_log_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities next to 0, where 1 - e^x has no digits, and at 0."""
    round_once(monkeypatch)
    near = -(2.0 ** torch.arange(-40, 2).float())
    first = Draft(torch.arange(len(near))[None, :, None], near[None, :, None])
    branches = Branches(first.top1[:, None], torch.tensor([[3]]), torch.tensor([[-1]]))
    for length in (0, 15, 16, 20, 39, 41):
        branches.prefix_len.fill_(length)
        again = Draft(first.tokens[:, None] + 50, torch.zeros(1, 1, len(near), 1))
        expected, found = both(monkeypatch, merged_branches, torch.tensor([0]), sources_of(first, branches, again), 128)
        assert found.score[found.valid].isfinite().all()
        torch.testing.assert_close(found.score.cpu(), expected.score, rtol=0 if INTERPRETED else 1e-6, atol=0)


@pytest.mark.parametrize("slots", [1, 5, 16])
def test_blocks(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 3):
        _, branches, _ = drafted(torch.Generator().manual_seed(1), slots, count, 50)
        anchor = torch.arange(5) + 70
        expected, found = both(monkeypatch, lambda b, a: restart_blocks(b, a, 99), branches, anchor)
        assert torch.equal(found.cpu(), expected)
