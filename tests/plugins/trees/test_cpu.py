"""The compiled tree work gives the same integers as its specifications, and the same bits of every score."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2sd.plugins.cpu import library
from d2sd.plugins.trees import Branches, Draft, Source
from d2sd.plugins.trees.cpu import accept_cpu, best_first_tree_cpu
from d2sd.plugins.trees.reference.accept import accept_reference
from d2sd.plugins.trees.reference.growth import best_first_tree_reference

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")
VOCAB = 40
SIZES = {"batch": st.integers(1, 3), "slots": st.integers(1, 7), "width": st.sampled_from([1, 4, 16])}


def draft(generator: torch.Generator, *shape: int) -> Draft:
    """Distinct tokens with falling probabilities, of which some are missing."""
    tokens = torch.rand(*shape[:-1], VOCAB, generator=generator).argsort(-1)[..., : shape[-1]]
    logprob = (2 * torch.randn(shape, generator=generator)).log_softmax(-1).sort(-1, descending=True).values
    missing = torch.rand(shape, generator=generator) < 0.05
    return Draft(tokens, logprob.masked_fill(missing, float("-inf")))


def best(draft: Draft, width: int) -> Draft:
    return Draft(draft.tokens[..., :width], draft.logprob[..., :width])


def restarts(generator: torch.Generator, first: Draft, count: int) -> Branches:
    """Branches whose prefixes are paths of the first draft, mostly."""
    batch, slots, width = first.tokens.shape
    ranks = torch.randint(min(2, width), (batch, count, slots, 1), generator=generator)
    tokens = first.tokens[:, None].expand(-1, count, -1, -1).gather(-1, ranks)[..., 0]
    prefix_len = torch.randint(slots + 1, (batch, count), generator=generator)
    return Branches(tokens, prefix_len, torch.full_like(prefix_len, -1))


@settings(max_examples=60, deadline=None)
@given(
    **SIZES, branches=st.sampled_from([0, 0, 3, 7]), copies=st.sampled_from([0, 2]),
    nodes=st.sampled_from([2, 5, 12, 33]), seed=st.integers(0, 999),
)  # fmt: skip
def test_trees_and_acceptance(
    batch: int, slots: int, width: int, branches: int, copies: int, nodes: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randint(VOCAB, (batch,), generator=generator)
    sources = [Source(first := draft(generator, batch, slots, width))]
    if branches:
        second = draft(generator, batch, branches, slots, width)
        sources.append(Source(second, restarts(generator, first, branches), replaces=True))
    if copies:
        sources.append(Source(best(draft(generator, batch, slots, 4), 2)))
        behind = best(draft(generator, batch, copies, slots, 4), 1)
        sources.append(Source(behind, restarts(generator, first, copies), replaces=seed % 2 == 0))
    expected, tree = (grow(anchor, sources, nodes) for grow in (best_first_tree_reference, best_first_tree_cpu))
    for field in fields(tree):
        assert torch.equal(getattr(tree, field.name), getattr(expected, field.name)), field.name

    chosen = torch.randint(VOCAB, tree.tokens.shape, generator=generator)
    agrees = torch.rand(tree.tokens.shape, generator=generator) < 0.6
    for b, node in (tree.valid & agrees & (tree.depth > 0)).nonzero().tolist():
        chosen[b, tree.parent[b, node]] = tree.tokens[b, node]
    found, accepted = accept_cpu(tree, chosen, slots + 1), accept_reference(expected, chosen, slots + 1)
    for field in fields(accepted):
        assert torch.equal(getattr(found, field.name), getattr(accepted, field.name)), field.name


def test_children_of_equal_score_stay_in_order() -> None:
    """Upper levels first, then the candidates' order: the tree must not depend on the heap."""
    same = torch.zeros(1, 3, 4)
    tokens = torch.arange(12).view(1, 3, 4)
    tree = best_first_tree_cpu(torch.tensor([39]), [Source(Draft(tokens, same))], 8)
    assert tree.tokens.tolist() == [[39, 0, 1, 2, 3, 4, 5, 6]]
    assert tree.parent.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert tree.depth.tolist() == [[0, 1, 1, 1, 1, 2, 2, 2]]
