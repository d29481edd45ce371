"""Tree policies: what is drafted and how it becomes a tree. All are lossless; rows and tokens a step differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from d2sd.errors import RecipeError
from d2sd.runtime import tree
from d2sd.runtime.boundaries import Draft
from d2sd.runtime.tree import Tree

PolicyName = Literal["off", "chain", "d2sd"]


class Policy(Protocol):
    """Static facts the step and the buffers are sized by, and the tree itself."""

    @property
    def drafters(self) -> int:
        """How many of the two drafters it runs."""

    @property
    def branches(self) -> int:
        """K; 0 without a second draft."""

    @property
    def rows(self) -> int:
        """Nodes of every tree."""

    def build(self, anchor: Tensor, first: Draft | None, second: Draft | None) -> Tree:
        """anchor [B], drafts [B, G] and [B, K, G] -> a tree of `rows` nodes."""


@dataclass(frozen=True, slots=True)
class Off:
    """Plain decoding: the anchor alone."""

    drafters = 0
    branches = 0
    rows = 1

    def build(self, anchor: Tensor, first: Draft | None, second: Draft | None) -> Tree:
        return tree.chain(anchor[:, None])


@dataclass(frozen=True, slots=True)
class Chain:
    """DFlash (arXiv 2602.06036): the first draft."""

    rows: int
    drafters = 1
    branches = 0

    def build(self, anchor: Tensor, first: Draft | None, second: Draft | None) -> Tree:
        assert first is not None
        return tree.chain(first.tokens)


@dataclass(frozen=True, slots=True)
class D2SD:
    """D²SD (arXiv 2606.04446): the first draft and K branches restarted at its likeliest rejection boundaries.

    Candidates go in one after the other, the first draft before the branches and these by boundary score, until the
    row budget is full.
    """

    rows: int
    branches: int
    drafters = 2

    def build(self, anchor: Tensor, first: Draft | None, second: Draft | None) -> Tree:
        assert first is not None
        assert second is not None
        return tree.merge(torch.cat([first.tokens[:, None], second.tokens], dim=1), self.rows)


def make_policy(name: PolicyName, *, block_size: int, branches: int, row_budget: int) -> Policy:
    """Raises RecipeError where the budget cannot hold what the policy drafts."""
    if name == "off":
        return Off()
    if row_budget < block_size:
        raise RecipeError(
            "the row budget is smaller than a chain", where="tree.row_budget",
            found=row_budget, expected=f"at least the block size, {block_size}",
        )  # fmt: skip
    if name == "chain":
        return Chain(block_size)
    if not 1 <= branches < block_size:
        raise RecipeError(
            "there are as many boundaries as drafts", where="tree.branches",
            found=branches, expected=f"1 .. {block_size - 1} at block size {block_size}",
        )  # fmt: skip
    return D2SD(min(row_budget, tree.max_nodes(block_size, branches)), branches)
