"""The compiled tree work gives the same integers as its specifications, and the same bits of every score."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2sd.plugins.cpu import library
from d2sd.plugins.trees import cpu as trees
from d2sd.runtime.speculation.accept import accept_reference
from d2sd.runtime.speculation.draft import Branches, Draft
from d2sd.runtime.speculation.growth import best_first_tree_reference

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")
VOCAB = 40
SIZES = {"batch": st.integers(1, 3), "slots": st.integers(1, 7), "width": st.sampled_from([1, 4, 16])}


def draft(generator: torch.Generator, *shape: int) -> Draft:
    """Distinct tokens with falling probabilities, of which some are missing."""
    tokens = torch.rand(*shape[:-1], VOCAB, generator=generator).argsort(-1)[..., : shape[-1]]
    logprob = (2 * torch.randn(shape, generator=generator)).log_softmax(-1).sort(-1, descending=True).values
    missing = torch.rand(shape, generator=generator) < 0.05
    return Draft(tokens, logprob.masked_fill(missing, float("-inf")))


def restarts(generator: torch.Generator, first: Draft, count: int) -> Branches:
    """Branches whose prefixes are paths of the first draft, mostly."""
    batch, slots, width = first.tokens.shape
    ranks = torch.randint(min(2, width), (batch, count, slots, 1), generator=generator)
    tokens = first.tokens[:, None].expand(-1, count, -1, -1).gather(-1, ranks)[..., 0]
    prefix_len = torch.randint(slots + 1, (batch, count), generator=generator)
    return Branches(tokens, prefix_len, torch.full_like(prefix_len, -1))


@settings(max_examples=60, deadline=None)
@given(**SIZES, branches=st.sampled_from([0, 0, 3, 7]), nodes=st.sampled_from([2, 5, 12, 33]), seed=st.integers(0, 999))
def test_trees_and_acceptance(batch: int, slots: int, width: int, branches: int, nodes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randint(VOCAB, (batch,), generator=generator)
    first = draft(generator, batch, slots, width)
    where = restarts(generator, first, branches) if branches else None
    second = draft(generator, batch, branches, slots, width) if branches else None
    expected = best_first_tree_reference(anchor, first, nodes, where, second)
    token, parent, depth, valid, mask, branch_id, score = trees.grow(
        anchor, first.tokens, first.logprob, nodes,
        None if where is None else (where.tokens, where.prefix_len),
        None if second is None else (second.tokens, second.logprob),
    )  # fmt: skip
    assert torch.equal(token, expected.tokens)
    assert torch.equal(parent, expected.parent)
    assert torch.equal(depth, expected.depth)
    assert torch.equal(valid, expected.valid)
    assert torch.equal(mask, expected.attn_mask)
    assert torch.equal(branch_id, expected.branch_id)
    assert torch.equal(score, expected.score)

    chosen = torch.randint(VOCAB, token.shape, generator=generator)
    agrees = torch.rand(token.shape, generator=generator) < 0.6
    for b, node in (valid & agrees & (depth > 0)).nonzero().tolist():
        chosen[b, parent[b, node]] = token[b, node]
    columns = token, parent, depth, valid, branch_id
    found = trees.accept(*columns, chosen, slots + 1)
    accepted = accept_reference(expected, chosen, slots + 1)
    for ours, field in zip(found, fields(accepted), strict=True):
        assert torch.equal(ours, getattr(accepted, field.name)), field.name


def test_children_of_equal_score_stay_in_order() -> None:
    """Upper levels first, then the candidates' order: the tree must not depend on the heap."""
    same = torch.zeros(1, 3, 4)
    tokens = torch.arange(12).view(1, 3, 4)
    token, parent, depth, *_ = trees.grow(torch.tensor([39]), tokens, same, 8)
    assert token.tolist() == [[39, 0, 1, 2, 3, 4, 5, 6]]
    assert parent.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert depth.tolist() == [[0, 1, 1, 1, 1, 2, 2, 2]]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1003])
def test_argmax_takes_the_first_of_equals_and_nan_first(size: int) -> None:
    logits = torch.randn(3, 4, size, generator=torch.Generator().manual_seed(size)).round(decimals=1)
    logits[0, 0] = float("-inf")
    logits[1, 1, size // 2 :] = float("nan")
    logits[2, 2, :] = -0.0
    logits[2, 2, size // 2] = 0.0
    assert torch.equal(trees.argmax(logits), logits.argmax(-1))
    assert torch.equal(trees.argmax(logits.transpose(0, 1)), logits.transpose(0, 1).argmax(-1))
