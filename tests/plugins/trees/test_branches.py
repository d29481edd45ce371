"""Where the second pass restarts: worked examples, and loops over scalars."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2sd.plugins.cpu import library
from d2sd.plugins.trees import Branches, Draft, Source, accept, best_first_tree, chain_branches, tree_branches
from d2sd.plugins.trees.reference.branches import boundary_scores
from tests.runtime.drafts import Passes, draft_of, passes
from tests.runtime.helpers import STEADY
from tests.runtime.oracle import Path, chain_worth, tree_worth

# arXiv 2606.04446, Figure 2b: block of 6, confidences of its five drafts.
PAPER = torch.tensor([[0.95, 0.84, 0.62, 0.70, 0.42]]).log()


def kept(branches: Branches, row: int) -> list[Path]:
    """The tokens that each branch of one request keeps."""
    own = zip(branches.tokens[row].tolist(), branches.prefix_len[row].tolist(), strict=True)
    return [tuple(tokens[:length]) for tokens, length in own]


def test_worked_example_of_the_paper() -> None:
    scores = boundary_scores(PAPER)
    expected = torch.tensor([[0.050, 0.152, 0.303, 0.148, 0.201]])
    torch.testing.assert_close(scores, expected, atol=6e-4, rtol=0)
    first = draft_of([[[(slot, float(p))] for slot, p in enumerate(PAPER[0])]])
    branches = chain_branches(first, 5)
    assert branches.prefix_len.tolist() == branches.rejected.tolist() == [[2, 4, 1, 3, 0]]
    assert kept(branches, 0) == [tuple(range(n)) for n in (2, 4, 1, 3, 0)]


@STEADY
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=15))
def test_scores_are_a_distribution_but_for_what_is_accepted(drafts: list[float]) -> None:
    scores = boundary_scores(torch.tensor([drafts]).log())[0]
    expected = chain_worth([[(0, math.log(p) if p else -math.inf)] for p in drafts])
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert float(scores.sum()) == pytest.approx(1 - math.prod(drafts), abs=1e-5)


@STEADY
@given(passes(), st.data())
def test_chain_branches_are_the_likeliest_boundaries(made: Passes, data: st.DataObject) -> None:
    size = made.first.top1.shape[1]
    count = data.draw(st.integers(1, size))
    branches = chain_branches(made.first, count)
    for row in range(len(made)):
        worth = chain_worth(made.slots(row))
        length, best = branches.prefix_len[row].tolist(), made.first.top1[row].tolist()
        assert len(set(length)) == count
        assert [worth[n] for n in length] == pytest.approx(sorted(worth, reverse=True)[:count], abs=1e-6)
        assert kept(branches, row) == [tuple(best[:n]) for n in length]
        assert branches.rejected[row].tolist() == [best[n] for n in length]


@STEADY
@given(passes(), st.integers(1, 7))
def test_tree_branches_are_the_nodes_worth_most(made: Passes, count: int) -> None:
    """More branches asked for than there are nodes: the rest keeps everything, and so redrafts nothing."""
    size = made.first.top1.shape[1]
    branches = tree_branches(made.batch.anchor, made.first, count)
    assert branches.tokens.shape == (len(made), count, size)
    assert (branches.rejected == -1).all()
    for row in range(len(made)):
        worth = tree_worth(made.slots(row))
        paths = [path for path in kept(branches, row) if len(path) < size]
        assert len(set(paths)) == len(paths)
        assert set(paths) <= worth.keys()
        got = [worth[path] for path in paths] + [0.0] * (count - len(paths))
        assert got == pytest.approx(sorted([*worth.values(), *[0.0] * count], reverse=True)[:count], abs=1e-6)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_block_of_one_draft_has_nothing_to_restart_behind(slots: int) -> None:
    first = draft_of([[[(1, -0.5), (2, -1.0)]] * slots])
    branches = tree_branches(torch.tensor([0]), first, 3)
    assert sorted(branches.prefix_len[0].tolist()) == ([1] * 3 if slots == 1 else [1, 1, 2])


COMPILED = pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")
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


@COMPILED
@settings(max_examples=60, deadline=None)
@given(
    **SIZES,
    branches=st.sampled_from([0, 0, 3, 7]),
    copies=st.sampled_from([0, 2]),
    nodes=st.sampled_from([2, 5, 12, 33]),
    seed=st.integers(0, 999),
)
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
        follows = seed % 3 == 0
        sources.append(Source(best(draft(generator, batch, slots, 4), 2), follows=follows))
        behind = best(draft(generator, batch, copies, slots, 4), 1)
        sources.append(Source(behind, restarts(generator, first, copies), replaces=seed % 2 == 0, follows=follows))
    expected, tree = (grow(anchor, sources, nodes) for grow in (best_first_tree.reference, best_first_tree.cpu))
    for field in fields(tree):
        if field.name != "rows":
            assert torch.equal(getattr(tree, field.name), getattr(expected, field.name)), field.name

    rows = torch.randint(nodes + 1, (batch,), generator=generator) if seed % 2 else None
    tree, expected = (replace(each, rows=rows) for each in (tree, expected))
    chosen = torch.randint(VOCAB, tree.tokens.shape, generator=generator)
    agrees = torch.rand(tree.tokens.shape, generator=generator) < 0.6
    for b, node in (tree.valid & agrees & (tree.depth > 0)).nonzero().tolist():
        chosen[b, tree.parent[b, node]] = tree.tokens[b, node]
    found, accepted = accept.cpu(tree, chosen, slots + 1), accept.reference(expected, chosen, slots + 1)
    assert torch.equal(found.path, accepted.path)
    assert torch.equal(found.packed(), accepted.packed())


@COMPILED
def test_children_of_equal_score_stay_in_order() -> None:
    """Upper levels first, then the candidates' order: the tree must not depend on the heap."""
    same = torch.zeros(1, 3, 4)
    tokens = torch.arange(12).view(1, 3, 4)
    tree = best_first_tree.cpu(torch.tensor([39]), [Source(Draft(tokens, same))], 8)
    assert tree.tokens.tolist() == [[39, 0, 1, 2, 3, 4, 5, 6]]
    assert tree.parent.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert tree.depth.tolist() == [[0, 1, 1, 1, 1, 2, 2, 2]]
