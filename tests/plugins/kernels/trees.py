"""The kernels of draft trees against the functions of the runtime that specify them: equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.plugins.trees import (
    Accepted,
    Branches,
    Draft,
    Source,
    Tree,
    accept,
    best_first_tree,
    from_candidates,
    from_chain,
)
from d2sd.runtime.decode import sources_of
from tests.plugins.kernels.calls import there
from tests.plugins.on_kernels import run_kernels

#: Candidates, slots, budget: none merges, all merge; more room than nodes, and less; no power of two anywhere.
MERGES = (
    (5, 6, 13),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((1, 1, 1), (1, 5, 3), (3, 4, 20), (8, 7, 40), (2, 16, 64), (5, 3, 130))
    ),
)
#: Slots, width, branches, rows. The children of the last one are sorted in two parts.
SMALL_GROWTHS = (0, 2, 0, 4), (3, 3, 3, 13)
GROWTHS = ((1, 1, 0, 1), (3, 4, 0, 10), (4, 3, 3, 21), (5, 5, 6, 64), (2, 16, 2, 33), (6, 2, 4, 7), (2, 20, 0, 130))


@pytest.fixture(autouse=True)
def specification(monkeypatch: pytest.MonkeyPatch) -> None:
    """In PyTorch, not in the compiled library of a CPU."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)


@pytest.fixture(autouse=True)
def stable_topk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `topk` take the first of equal scores, which it leaves open."""

    def topk(x: Tensor, k: int, dim: int = -1) -> Any:
        found = x.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k)))

    monkeypatch.setattr(Tensor, "topk", topk)


def both(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
    """The specification's result, and the kernels'."""
    run_kernels(monkeypatch, "trees", on=False)
    expected = make(*given)
    run_kernels(monkeypatch, "trees")
    return expected, make(*(there(x) for x in given))


def assert_equal(expected: Tree | Accepted | Branches, found: Tree | Accepted | Branches) -> None:
    for field in fields(expected):
        if field.name in ("row", "rows"):  # a form of the others, and what is given
            continue
        one, other = getattr(expected, field.name), getattr(found, field.name).cpu()
        assert one.dtype == other.dtype, field.name
        assert torch.equal(one, other), (field.name, one, other)


def scores(draw: torch.Generator, *shape: int, ties: bool) -> Tensor:
    """Log-probabilities in no order, one in eight -inf; with ties they are 0, -1/2 or -1."""
    values = torch.randint(0, 3, shape, generator=draw) / -2 if ties else torch.randn(shape, generator=draw).abs().neg()
    return values.masked_fill(torch.rand(shape, generator=draw) < 0.125, float("-inf"))


def random_candidates(draw: torch.Generator, count: int, size: int, vocab: int) -> Tensor:
    tokens = torch.randint(0, vocab, (3, count, size), generator=draw)
    tokens[..., 0] = tokens[:, :1, 0]
    return tokens


@pytest.mark.parametrize(("count", "size", "budget"), MERGES)
@pytest.mark.parametrize("vocab", [1, 2])
def test_candidates(count: int, size: int, budget: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    tokens, score = random_candidates(draw, count, size, vocab), scores(draw, 3, count, size, ties=False)
    score[..., 0] = 0
    assert_equal(*both(monkeypatch, from_candidates, tokens, score.cumsum(-1), budget))


@pytest.mark.parametrize("size", [1, 5, 16])
def test_chain(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    tokens, score = torch.randint(0, 9, (3, size + 1), generator=draw), scores(draw, 3, size + 1, ties=False)
    score[:, 0] = 0
    assert_equal(*both(monkeypatch, from_chain, tokens[:, :size], score.cumsum(-1)[:, :size]))


def random_drafts(
    draw: torch.Generator, slots: int, width: int, count: int, ties: bool
) -> tuple[Draft, Branches | None, Draft | None]:
    """Drafts over few tokens, so that paths pass through branches; siblings differ."""
    vocab = width + 2

    def siblings(*shape: int) -> Tensor:
        return torch.rand(*shape, vocab, generator=draw).argsort(-1)[..., :width]

    first = Draft(siblings(3, slots), scores(draw, 3, slots, width, ties=ties))
    if not count:
        return first, None, None
    kept = first.tokens[..., 0][:, None].repeat(1, count, 1)
    kept = torch.where(torch.rand(kept.shape, generator=draw) < 0.5, kept, siblings(3, count, slots)[..., 0])
    length = torch.randint(0, slots + 1, (3, count), generator=draw)
    branches = Branches(kept, length, torch.full_like(length, -1))
    return first, branches, Draft(siblings(3, count, slots), scores(draw, 3, count, slots, width, ties=ties))


@pytest.mark.parametrize(
    ("slots", "width", "count", "rows", "ties"),
    [
        *((*case, ties) for case in SMALL_GROWTHS for ties in (False, True)),
        *(  # in CI each with ties or without
            pytest.param(*case, ties, marks=[pytest.mark.slow, *([pytest.mark.full] if (place + ties) % 4 else [])])
            for place, case in enumerate(GROWTHS)
            for ties in (False, True)
        ),
    ],
)
def test_growth(slots: int, width: int, count: int, rows: int, ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    first, branches, second = random_drafts(draw, slots, width, count, ties)
    anchor = torch.tensor([7, 8, 9])
    assert_equal(*both(monkeypatch, best_first_tree, anchor, sources_of(first, branches, second), rows))


@pytest.mark.parametrize(
    ("slots", "widths", "counts", "rows"),
    [
        (2, (2, 1, 1), (0, 0, 1), 5),
        (2, (3, 2, 3), (1, 2, 0), 9),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((4, (3, 2, 1), (2, 0, 3), 21), (2, (8, 1), (0, 5), 130))
        ),
        pytest.param(5, (16, 1, 4, 2), (7, 0, 2, 1), 64, marks=[pytest.mark.slow, pytest.mark.full]),
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_sources(
    slots: int, widths: tuple[int, ...], counts: tuple[int, ...], rows: int, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lane of two passes or one, beside it copies at the root or behind nodes, and so on; many children meet."""
    draw = torch.Generator().manual_seed(1)
    sources = list[Source]()
    for width, count in zip(widths, counts, strict=True):
        first, branches, second = random_drafts(draw, slots, width, count, ties)
        sources += sources_of(first if not sources or count != 1 else None, branches, second)
        sources[-1] = replace(sources[-1], replaces=count != 1, follows=len(sources) > 1 and ties)
    assert_equal(*both(monkeypatch, best_first_tree, torch.tensor([7, 8, 9]), sources, rows))


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("slots", "widths", "counts", "rows"),
    [
        (3, (3, 3, 1), (0, 2, 1), 13),
        pytest.param(4, (5, 5, 2), (0, 4, 2), 30, marks=[pytest.mark.slow, pytest.mark.full]),
        (3, (4, 2), (0, 1), 40),
    ],
)
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1), (2,)])
@pytest.mark.parametrize("ties", [False, True])
def test_candidates_behind_those_of_the_slot_before(
    slots: int,
    widths: tuple[int, ...],
    counts: tuple[int, ...],
    rows: int,
    which: tuple[int, ...],
    ties: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(3)
    sources = list[Source]()
    for width, count in zip(widths, counts, strict=True):
        first, branches, second = random_drafts(draw, slots, width, count, ties)
        sources += sources_of(first if not sources or count != 1 else None, branches, second)
    for place in {min(n, len(sources) - 1) for n in which}:
        draft = sources[place].draft
        told = scores(draw, *draft.tokens.shape, draft.tokens.shape[-1], ties=ties)
        told = torch.cat([draft.logprob[..., None, :], told], -2)
        sources[place] = replace(sources[place], draft=replace(draft, behind=told))
    assert_equal(*both(monkeypatch, best_first_tree, torch.tensor([7, 8, 9]), sources, rows))


@pytest.mark.slow
def test_as_many_branches_as_a_word_has_bits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is entered."""
    count = 51
    tokens = torch.arange(64).expand(1, 3, 64).contiguous()
    score = -torch.arange(64) * torch.tensor([[0.001], [9.0], [9.0]])  # a branch behind each first token, and token 0
    first = Draft(tokens, score[None])
    kept = torch.stack([torch.arange(count), *torch.zeros(2, count, dtype=torch.long)], -1)[None]
    length = torch.full((1, count), 2)
    second = Draft(torch.full((1, count, 3, 1), 5), torch.full((1, count, 3, 1), -0.0001))
    sources = [Source(first), Source(second, Branches(kept, length, torch.full_like(length, -1)), replaces=True)]
    expected, found = both(monkeypatch, best_first_tree, torch.tensor([7]), sources, 1 + 3 * count)
    assert int(expected.branch_id.max()) == count
    assert_equal(expected, found)


def test_a_draft_that_is_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tree_branches` takes such a slice: all slots but the last."""
    first, _, _ = random_drafts(torch.Generator().manual_seed(1), 3, 3, 0, ties=False)
    sliced = Draft(first.tokens[:, :-1], first.logprob[:, :-1])
    assert_equal(*both(monkeypatch, best_first_tree, torch.tensor([7, 8, 9]), [Source(sliced)], 9))


def test_nothing_proposed_and_everything_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    first, branches, second = random_drafts(torch.Generator().manual_seed(2), 2, 3, 2, ties=True)
    assert branches is not None
    assert second is not None
    anchor = torch.tensor([7, 8, 9])
    for value in (float("-inf"), -0.0):
        drafts = [Draft(x.tokens, torch.full_like(x.logprob, value)) for x in (first, second)]
        assert_equal(*both(monkeypatch, best_first_tree, anchor, sources_of(drafts[0], branches, drafts[1]), 9))


def test_growth_of_more_than_16_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last node has as many ancestors."""
    draft = Draft(torch.arange(1, 19).view(1, 18, 1), torch.full((1, 18, 1), -0.1))
    expected, found = both(monkeypatch, best_first_tree, torch.tensor([7]), sources_of(draft, None, None), 19)
    assert_equal(expected, found)
    assert expected.attn_mask[0, -1].all()


@pytest.mark.parametrize(("count", "size", "budget"), MERGES)
def test_acceptance(count: int, size: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes may be accepted, or those that each request may verify."""
    draw = torch.Generator().manual_seed(1)
    for vocab, rows in product((1, 2, 3), (None, torch.tensor([0, 2, 1024]))):
        run_kernels(monkeypatch, "trees", on=False)
        tokens = random_candidates(draw, count, size, vocab)
        tree = replace(from_candidates(tokens, torch.zeros(tokens.shape), budget), rows=rows)
        chosen = torch.randint(0, vocab, (3, budget), generator=draw)
        expected, found = both(monkeypatch, accept, tree, chosen, size)
        assert_equal(expected, found)
        assert torch.equal(found.packed().cpu(), expected.packed())
        assert rows is None or expected.count[0] == 1


def test_padding_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding has token 0 and the root for a parent, as a child has that the target chooses when it picks id 0."""
    tree = from_candidates(torch.tensor([[[5, 1, 2]]]), torch.zeros(1, 1, 3), 8)
    expected, found = both(monkeypatch, accept, tree, torch.zeros(1, 8, dtype=torch.long), 3)
    assert_equal(expected, found)
    assert expected.count.tolist() == [1]
    assert torch.equal(found.packed().cpu(), expected.packed())
