from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2sd.runtime.boundaries import Draft, boundary_scores, branch_blocks, forbid_rejected, joined, pick_boundaries
from tests.runtime.helpers import STEADY

# arXiv 2606.04446, Figure 2b: block of 6, the anchor's confidence first.
PAPER = torch.tensor([[1.00, 0.95, 0.84, 0.62, 0.70, 0.42]])

FIRST = Draft(torch.tensor([[7, 1, 2, 3], [8, 4, 5, 6]]), torch.tensor([[1.0, 0.9, 0.5, 0.8], [1.0, 0.2, 0.6, 0.7]]))
BOUNDARIES = torch.tensor([[1, 0], [2, 1]])


def test_worked_example_of_the_paper() -> None:
    scores = boundary_scores(PAPER)
    torch.testing.assert_close(scores, torch.tensor([[0.050, 0.152, 0.303, 0.148, 0.201]]), atol=6e-4, rtol=0)
    assert pick_boundaries(Draft(torch.zeros(1, 6, dtype=torch.long), PAPER), 4).tolist() == [[2, 4, 1, 3]]


@STEADY
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=15))
def test_scores_and_full_acceptance_add_up_to_one(drafts: list[float]) -> None:
    scores = boundary_scores(torch.tensor([[1.0, *drafts]]))[0]
    everything, reached = 1.0, []
    for confidence in drafts:
        reached.append(everything * (1 - confidence))
        everything *= confidence
    assert scores.tolist() == pytest.approx(reached, abs=1e-5)
    assert float(scores.sum()) == pytest.approx(1 - everything, abs=1e-5)


def test_the_anchor_does_not_count() -> None:
    other = PAPER.clone()
    other[:, 0] = 0.1
    assert torch.equal(boundary_scores(other), boundary_scores(PAPER))


def test_certain_and_impossible_drafts() -> None:
    scores = boundary_scores(torch.tensor([[1.0, 1.0, 0.0, 0.5]]))
    assert scores.tolist() == [[0.0, 1.0, 0.0]]


def test_requests_are_scored_alone() -> None:
    both = torch.cat([PAPER, PAPER.flip(1)])
    assert torch.equal(boundary_scores(both)[:1], boundary_scores(PAPER))


def test_blocks_keep_the_prefix_and_mask_the_rest() -> None:
    blocks, rejected = branch_blocks(FIRST, BOUNDARIES, mask_token_id=99)
    assert blocks.tolist() == [[[7, 1, 99, 99], [7, 99, 99, 99]], [[8, 4, 5, 99], [8, 4, 99, 99]]]
    assert rejected.tolist() == [[2, 1], [6, 5]]


def test_only_the_rejected_token_is_forbidden() -> None:
    _, rejected = branch_blocks(FIRST, BOUNDARIES, mask_token_id=99)
    logits = forbid_rejected(torch.zeros(2, 2, 3, 10), BOUNDARIES, rejected)
    found = logits.isinf().nonzero().tolist()
    # request, branch, slot behind the boundary (slot 1 lies at index 0), token
    assert found == [[0, 0, 1, 2], [0, 1, 0, 1], [1, 0, 2, 6], [1, 1, 1, 5]]
    assert (logits[logits.isinf()] < 0).all()


def test_branches_join_both_drafts() -> None:
    tokens = torch.arange(100, 116).view(2, 2, 4)
    confidence = torch.full((2, 2, 4), 0.25)
    branches = joined(FIRST, BOUNDARIES, tokens, confidence)
    assert branches.tokens.tolist() == [
        [[7, 1, 102, 103], [7, 105, 106, 107]],
        [[8, 4, 5, 111], [8, 4, 114, 115]],
    ]
    expected = [[[1.0, 0.9, 0.25, 0.25], [1.0, 0.25, 0.25, 0.25]], [[1.0, 0.2, 0.6, 0.25], [1.0, 0.2, 0.25, 0.25]]]
    torch.testing.assert_close(branches.confidence, torch.tensor(expected))
