"""Drafts drawn at random, and trees of tensors read back as lists of nodes, for comparison with `oracle`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from d2sd.modeling.where import Where
from d2sd.plugins.trees import Branches, Draft, Source, Tree
from d2sd.runtime.batch import Batch
from d2sd.runtime.decode import sources_of
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.oracle import Node, Path, Slots

#: What a branch's second draft holds in the slots it kept: nothing may read it.
NONSENSE = (-1, 0.0)


@dataclass(frozen=True)
class Passes:
    """Two draft passes of a few requests. Scores are multiples of a power of two, so that fp32 adds them up exactly."""

    batch: Batch
    seeds: tuple[int, ...]
    first: Draft
    branches: Branches
    second: Draft

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def count(self) -> int:
        return self.branches.prefix_len.shape[1]

    @property
    def sources(self) -> list[Source]:
        """The first pass, and the second in its place."""
        return sources_of(self.first, self.branches, self.second)

    def anchor(self, row: int) -> int:
        return int(self.batch.anchor[row])

    def slots(self, row: int) -> Slots:
        return slots_of(self.first, row)

    def behind(self, row: int) -> list[tuple[Path, Slots]]:
        """Kept tokens and candidates of every branch of one request."""
        kept = [tokens[:n] for tokens, n in zip(self.branches.tokens[row], self.branches.prefix_len[row], strict=True)]
        return [(tuple(k.tolist()), slots_of(self.second, row, b)) for b, k in enumerate(kept)]

    def only(self, row: int) -> Passes:
        """One request alone."""
        one, first, branches, second = slice(row, row + 1), self.first, self.branches, self.second
        return Passes(
            batch_of(self.batch.anchor[one].tolist(), self.batch.where.context_len[one].tolist(), self.seeds[one]),
            self.seeds[one],
            Draft(first.tokens[one], first.logprob[one]),
            Branches(branches.tokens[one], branches.prefix_len[one], branches.rejected[one]),
            Draft(second.tokens[one], second.logprob[one]),
        )


def batch_of(anchor: Sequence[int], context: Sequence[int], seeds: Sequence[int], temperature: float = 0.0) -> Batch:
    return Batch(
        torch.tensor(anchor),
        Where(torch.zeros(len(anchor), 1, dtype=torch.long), torch.tensor(context)),
        torch.ones(len(anchor), dtype=torch.bool),
        Sampling.of([SamplingParams(temperature, seed=seed) for seed in seeds], 64, "cpu"),
    )


def slots_of(draft: Draft, *place: int) -> Slots:
    tokens, logprob = draft.tokens[place].tolist(), draft.logprob[place].tolist()
    return [list(zip(*slot, strict=True)) for slot in zip(tokens, logprob, strict=True)]


def draft_of(slots: Sequence[object]) -> Draft:
    """From (token, log-probability) pairs nested in any shape."""
    pairs = torch.tensor(slots, dtype=torch.float64)
    return Draft(pairs[..., 0].long(), pairs[..., 1].float())


@st.composite
def passes(
    draw: st.DrawFn, *, ties: bool | None = None, width: int = 3, slots: int | None = None, requests: int | None = None
) -> Passes:
    """One to three requests of up to four slots over few tokens, so that branches and paths meet.

    Scores stand in any order, as a calibration may leave them. With ties they are 0 (certain), -1/2, -1 or -inf;
    without, no two sums are equal but by accident.
    """
    slots = slots or draw(st.integers(1, 4))
    width, count = draw(st.integers(1, width)), draw(st.integers(1, 4))
    vocab, tied = width + draw(st.integers(0, 2)), draw(st.booleans()) if ties is None else ties
    dice = random.Random(draw(st.integers(0, 2**32)))

    def slot() -> list[tuple[int, float]]:
        def score() -> float:
            if dice.random() < 0.15:
                return -math.inf
            return -dice.randrange(3) / 2 if tied else -dice.randrange(1, 2**19) / 2**16

        return [(token, score()) for token in dice.sample(range(vocab), width)]

    def redrafted(kept: int) -> list[list[tuple[int, float]]]:
        return [[NONSENSE] * width if place < kept else slot() for place in range(slots)]

    rows = requests or draw(st.integers(1, 3))
    length = [[dice.randint(0, slots) for _ in range(count)] for _ in range(rows)]
    seeds = tuple(dice.getrandbits(64) for _ in range(rows))
    tokens = [[[dice.randrange(vocab) for _ in range(slots)] for _ in range(count)] for _ in range(rows)]
    return Passes(
        batch_of([dice.randrange(vocab) for _ in range(rows)], [dice.randrange(99) for _ in range(rows)], seeds),
        seeds,
        draft_of([[slot() for _ in range(slots)] for _ in range(rows)]),
        Branches(torch.tensor(tokens), torch.tensor(length), torch.full((rows, count), -1)),
        draft_of([[redrafted(kept) for kept in own] for own in length]),
    )


def nodes_of(tree: Tree, row: int) -> list[Node]:
    """One request's nodes, after checking that all columns tell the same tree and that padding is invisible."""
    size, count = tree.tokens.shape[1], int(tree.valid[row].sum())
    tokens, parent, depth = tree.tokens[row].tolist(), tree.parent[row].tolist(), tree.depth[row].tolist()
    branch_id, score = tree.branch_id[row].tolist(), tree.score[row].tolist()
    assert tree.valid[row].tolist() == [n < count for n in range(size)]
    assert count > 0
    assert (parent[0], depth[0]) == (0, 0)
    paths: list[Path] = [(tokens[0],)]
    for node in range(1, count):
        assert parent[node] < node
        paths.append((*paths[parent[node]], tokens[node]))
        assert depth[node] == depth[parent[node]] + 1
    assert len(set(paths)) == count, "siblings are equal"
    attn_mask = [[path[: len(other)] == other for other in paths] + [False] * (size - count) for path in paths]
    attn_mask += [[n == m for m in range(size)] for n in range(count, size)]
    assert tree.attn_mask[row].tolist() == attn_mask
    assert all(s == -math.inf for s in score[count:])
    for node in range(count, size):  # what padding says must stay in range: it is embedded, gathered and placed
        assert tokens[node] == branch_id[node] == 0
        assert 0 <= parent[node] < node
        assert 0 <= depth[node] <= node
    return [Node(*one) for one in zip(paths, branch_id[:count], score[:count], strict=True)]


def check_best(nodes: Sequence[Node], everything: Sequence[Node], rows: int) -> None:
    """`nodes` are the `rows` best of `everything`, both in descending order; ties may be broken in any way."""
    assert [n.score for n in nodes] == [n.score for n in everything[:rows]]
    assert set(nodes) <= set(everything)
    if len({n.score for n in everything[: rows + 1]}) == len(everything[: rows + 1]):
        assert list(nodes) == list(everything[:rows])
