"""The kernels of branches against the functions of the runtime that specify them, and against loops over numbers.

Exponentials and logarithms of the specification are the correctly rounded ones here, as in the interpreter; where
kernels are compiled a score may differ in its last digits. Everything else is equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from d2sd.plugins import trees
from d2sd.plugins.trees import (
    Branches,
    Draft,
    Source,
    Tree,
    best_first_tree,
    chain_branches,
    merged_branches,
    restart_blocks,
    tree_branches,
)
from d2sd.runtime.decode import sources_of
from tests.plugins.kernels.calls import INTERPRETED
from tests.plugins.kernels.trees import assert_equal, both, specification, stable_topk
from tests.plugins.on_kernels import run_kernels

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


def f32(x: float) -> float:
    return float(np.float32(x))


def log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def likeliest(confidence: list[float], count: int) -> list[int]:
    """Boundaries by the probability that the chain ends there."""
    scores, total = [], 0.0
    for value in confidence:
        scores.append(f32(f32(math.exp(f32(total))) * f32(-math.expm1(value))))
        total += value
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:count]


@pytest.mark.parametrize("slots", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 15, 16))])
@pytest.mark.parametrize("width", [1, 2])
def test_boundaries(slots: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    round_once(monkeypatch)
    draw = torch.Generator().manual_seed(slots)
    tokens = torch.randint(0, 99, (9, slots, width), generator=draw)
    first = Draft(tokens, confidences(draw, 9, slots, width))
    for count in sorted({1, slots // 2 + 1, slots}):
        expected, found = both(monkeypatch, chain_branches, first, count)
        for name in ("tokens", "prefix_len", "rejected"):
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
        loops = [likeliest(row, count) for row in first.confidence.tolist()]
        assert found.prefix_len.tolist() == loops
        pairs = zip(first.top1.tolist(), loops, strict=True)
        assert found.rejected.tolist() == [[row[i] for i in at] for row, at in pairs]


def restarts(tree: Tree, first: Draft, row: int, count: int) -> list[tuple[list[int], int]]:
    """Kept tokens and prefix lengths of one request's best nodes, whose paths are followed parent by parent."""
    top1, confidence = first.top1[row].tolist(), first.confidence[row].tolist()
    found = []
    for n in range(tree.tokens.shape[1]):
        path, at = list[int](), n
        while tree.valid[row, n] and at:
            path.insert(0, int(tree.tokens[row, at]))
            at = int(tree.parent[row, at])
        score = float(tree.score[row, n]) if path else -math.inf
        if path and path == top1[: len(path)]:
            score = f32(score + f32(log(f32(-math.expm1(min(confidence[len(path)], f32(-1e-7)))))))
        found.append((path, score))
    best = sorted(found, key=lambda node: -node[1])[:count]
    slots = len(top1)
    return [(path + [0] * (slots - len(path)), len(path) or slots) for path, _ in best]


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
    expected, found = both(monkeypatch, tree_branches, anchor, first, count)
    for name in ("tokens", "prefix_len", "rejected"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    run_kernels(monkeypatch, trees.OP, on=False)
    tree = best_first_tree(anchor, [Source(first.part(slice(None), slice(-1)))], count + slots)
    for row in range(9):
        loops = restarts(tree, first, row, count)
        assert list(zip(found.tokens[row].tolist(), found.prefix_len[row].tolist(), strict=True)) == loops
    assert (found.rejected == -1).all()


def tree_of(anchor: int, first: Draft, branches: Branches, second: Draft, row: int, budget: int) -> dict[str, Any]:
    """One request's columns, node by node."""
    top1, confidence = first.top1[row].tolist(), first.confidence[row].tolist()
    candidates = [([anchor, *top1], [0.0, *confidence])]
    for k, length in enumerate(branches.prefix_len[row].tolist()):
        path, logprob = [anchor], [0.0]
        for slot in range(len(top1)):
            if slot < length:
                path.append(int(branches.tokens[row, k, slot]))
                logprob.append(confidence[slot])
            else:
                at_boundary = f32(log(f32(-math.expm1(min(confidence[slot], f32(-1e-7)))))) if slot == length else 0.0
                path.append(int(second.top1[row, k, slot]))
                logprob.append(f32(float(second.confidence[row, k, slot]) + at_boundary))
        candidates.append((path, logprob))
    nodes: dict[tuple[int, ...], tuple[int, int, int, float]] = {}  # tokens so far: parent, depth, candidate, score
    numbers: dict[tuple[int, ...], int] = {}
    proposed = 0
    for number, (path, logprob) in enumerate(candidates):
        for depth in range(len(path)):
            if f32(sum(logprob[: depth + 1])) == -math.inf:
                break  # nothing is proposed from here on
            proposed += 1
            key = tuple(path[: depth + 1])
            if key not in nodes:
                numbers[key] = len(nodes)
                nodes[key] = numbers.get(key[:-1], 0), depth, number, f32(sum(logprob[: depth + 1]))
    kept = list(nodes)[:budget]
    sees = [[other == key[: len(other)] for other in kept] for key in kept]
    padding = budget - len(kept)
    return {
        "tokens": [key[-1] for key in kept] + [0] * padding,
        "parent": [nodes[key][0] for key in kept] + [0] * padding,
        "depth": [nodes[key][1] for key in kept] + [0] * padding,
        "branch_id": [nodes[key][2] for key in kept] + [0] * padding,
        "score": [nodes[key][3] for key in kept] + [-math.inf] * padding,
        "valid": [True] * len(kept) + [False] * padding,
        "attn_mask": [[i == j if max(i, j) >= len(kept) else sees[i][j] for j in range(budget)] for i in range(budget)],
        "num_merged": proposed - len(nodes),
    }


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
        for row in range(5):
            for name, values in tree_of(row + 7, *drafts, row, budget).items():
                assert getattr(found, name)[row].tolist() == values, name


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
        loops = [
            [
                [row + 70, *(int(kept[slot]) if slot < length else 99 for slot in range(slots))]
                for kept, length in zip(branches.tokens[row], branches.prefix_len[row].tolist(), strict=True)
            ]
            for row in range(5)
        ]
        assert found.tolist() == loops
