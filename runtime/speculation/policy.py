"""Tree policies: what is drafted and how it becomes a tree. All are lossless; nodes and tokens a step differ.

policy         first pass      second pass                      tree
off            -               -                                the anchor: plain decoding
lookup         a copy of text  -                                a chain: the baseline for drafters
chain          first drafter   -                                a chain: DFlash (arXiv 2602.06036)
reanchor       first drafter   first drafter at K boundaries    the chain and K branches
d2sd           first drafter   second drafter at K boundaries   the same: D²SD (arXiv 2606.04446)
ddtree         first drafter   -                                likeliest paths of one pass: DDTree
hybrid         first drafter   second drafter at K tree nodes   likeliest paths of both passes
               first drafter   first drafter at K tree nodes    the same, in a bundle without a second drafter
flex_parallel  the step before -                                a chain; behind the target, blocks for the next chain
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from d2sd.errors import RecipeError
from d2sd.plugins import trees
from d2sd.plugins.choice import WIDTH
from d2sd.plugins.trees import Branches, Draft, Source, Tree
from d2sd.policies import FACTS, MAX_NODES, DrafterRole, DraftUse, FirstPass, PolicyName
from d2sd.runtime.batch import Batch
from d2sd.runtime.stats import COPY

if TYPE_CHECKING:
    from typing_extensions import Self


#: Node budgets that `auto` compares: throughput is flat around the optimum. A tile of the CPU kernels has twelve rows.
AUTO_SIZES = (4, 8, 12, 16, 24, 32, 64)
#: Nodes and branches that it compares of `hybrid`, besides its largest tree with the recipe's branches. A branch costs
#: a block of rows whatever the tree's size, and a small tree has room for the likeliest branches alone: the best of
#: these is within 1 % of the best of all sizes with 1, 2 and 4 branches, by the clock of tests/runtime/gpu_steps.py.
AUTO_PAIRS = ((8, 1), (12, 1), (16, 2), (32, 2), (32, 4))
AUTO_BRANCHES = tuple(sorted({branches for _, branches in AUTO_PAIRS}))


@dataclass(frozen=True, slots=True)
class Policy:
    """Builds the tree of a step; its static sizes determine the shapes of the step's tensors."""

    num_nodes: int  # nodes of every tree
    num_branches: int = 0  # K
    lookup: bool = False  # a copy of earlier text competes with the drafts
    #: Drafts the branches in place of the drafter of the second pass; None: that one does.
    fallback: DrafterRole | None = None

    name: ClassVar[PolicyName]
    topk: ClassVar[int] = 1  # M, candidates of every slot
    uses_probabilities: ClassVar[bool] = True  # ranks by probability, so a calibration applies

    def __str__(self) -> str:
        name = f"{self.name}+lookup" if self.lookup else self.name
        if self.num_nodes > 1:
            name += f" of {self.num_nodes} rows"
        if self.num_branches:
            name += f" and {self.num_branches} branch{'es' if self.num_branches > 1 else ''}"
        return name

    @property
    def first_pass(self) -> FirstPass:
        return FACTS[self.name].first_pass

    @property
    def second_pass(self) -> DrafterRole | None:
        """The drafter that drafts the branches."""
        return FACTS[self.name].second_pass if self.fallback is None else self.fallback

    @property
    def first_use(self) -> DraftUse:
        """The use whose calibration applies to the first draft."""
        return FACTS[self.name].first_use

    @property
    def second_use(self) -> DraftUse:
        """The use whose calibration applies to the branches; without a second pass, `first_use`."""
        own = FACTS[self.name].second_use
        return self.first_use if own is None else own

    @property
    def drafters(self) -> tuple[DrafterRole, ...]:
        """The drafters that this policy runs."""
        if self.fallback is None:
            return FACTS[self.name].drafters
        return tuple(dict.fromkeys((DrafterRole.FIRST, self.fallback)))

    def among(self, drafters: Collection[DrafterRole]) -> Self:
        """The policy in a bundle with these drafters: see `PolicyFacts.among`."""
        facts = FACTS[self.name]
        resolved = facts.among(drafters)
        return self if resolved is facts else replace(self, fallback=resolved.second_pass)

    def proposer(self, row: int) -> int:
        """The proposer of a node of `Tree.branch_id` `row`: FIRST_DRAFT, a branch from 1, or COPY."""
        branches = 0 if self.second_pass is None else self.num_branches
        return COPY if self.lookup and row > branches else row

    @property
    def copies(self) -> bool:
        """Whether its trees hold copies of earlier text."""
        return self.lookup or self.first_pass is FirstPass.PROMPT_LOOKUP

    @classmethod
    def sized(cls, block_size: int, branches: int, rows: int) -> Self:
        """The policy with at most `rows` nodes. Raises RecipeError if a block has fewer boundaries than `branches`."""
        return cls(rows)

    @classmethod
    def candidates(cls, block_size: int, branches: int, rows: int) -> list[tuple[int, int]]:
        """Node budgets that `auto` compares, up to `rows`, and the branches with each, up to `branches`."""
        return [(size, branches) for size in cls.candidate_sizes(block_size, rows)]

    @classmethod
    def candidate_sizes(cls, block_size: int, rows: int) -> list[int]:
        """Node budgets that `auto` compares, up to `rows`."""
        return [size for size in AUTO_SIZES if size <= rows] if FACTS[cls.name].grows else [rows]

    def branches(self, batch: Batch, first: Draft) -> Branches:
        """Restart points of the second pass; only for policies that have one."""
        raise NotImplementedError

    def build(self, batch: Batch, sources: Sequence[Source]) -> Tree:
        """A tree of `num_nodes` nodes of the first draft, if there is one, and of all sources behind it."""
        raise NotImplementedError


class Off(Policy):
    name = "off"

    @classmethod
    def sized(cls, block_size: int, branches: int, rows: int) -> Self:
        """One node, whatever the arguments."""
        return cls(1)

    def build(self, batch: Batch, sources: Sequence[Source]) -> Tree:
        anchor = batch.anchor[:, None]
        return trees.from_chain(anchor, torch.zeros_like(anchor, dtype=torch.float32))


class _Chained(Policy):
    """The likeliest token of every slot of the first draft."""

    @classmethod
    def sized(cls, block_size: int, branches: int, rows: int) -> Self:
        """At most a block."""
        return cls(min(rows, block_size))

    def build(self, batch: Batch, sources: Sequence[Source]) -> Tree:
        first = sources[0].draft
        tokens, score = trees.with_anchor(batch.anchor, first.top1, first.confidence)
        return trees.from_chain(tokens[:, : self.num_nodes], score[:, : self.num_nodes])


class Chain(_Chained):
    name = "chain"


class Lookup(_Chained):
    name = "lookup"
    uses_probabilities = False

    @classmethod
    def candidate_sizes(cls, block_size: int, rows: int) -> list[int]:
        """Chains shorter than a block too: without a drafter's pass, rows are all that a step costs."""
        return [*(size for size in AUTO_SIZES if size < min(rows, block_size)), min(rows, block_size)]


class _Branched(Policy):
    """Adds the first draft and then the branches, sorted by boundary score, until the node budget is full."""

    @classmethod
    def sized(cls, block_size: int, branches: int, rows: int) -> Self:
        """At most the nodes of the chain and all branches."""
        if not 1 <= branches < block_size:
            raise RecipeError(
                "the number of branches exceeds the boundaries of a block",
                where="tree.branches",
                found=branches,
                expected=f"1 .. {block_size - 1} at block size {block_size}",
            )
        return cls(min(rows, trees.max_nodes(block_size, branches)), branches)

    def branches(self, batch: Batch, first: Draft) -> Branches:
        return trees.chain_branches(first, self.num_branches)

    def build(self, batch: Batch, sources: Sequence[Source]) -> Tree:
        return trees.merged_branches(batch.anchor, sources, self.num_nodes)


class Reanchor(_Branched):
    name = "reanchor"


class D2SD(_Branched):
    name = "d2sd"


class _Grown(Policy):
    """The likeliest paths of all sources."""

    topk = WIDTH

    def build(self, batch: Batch, sources: Sequence[Source]) -> Tree:
        return trees.best_first_tree(batch.anchor, sources, self.num_nodes)


class DDTree(_Grown):
    name = "ddtree"


class Hybrid(_Grown):
    name = "hybrid"

    @classmethod
    def sized(cls, block_size: int, branches: int, rows: int) -> Self:
        """Exactly `rows` nodes."""
        return cls(rows, branches)

    @classmethod
    def candidates(cls, block_size: int, branches: int, rows: int) -> list[tuple[int, int]]:
        """Fewer branches than the recipe's too, in smaller trees."""
        largest = cls.candidate_sizes(block_size, rows)[-1:]
        pairs = [(size, min(few, branches)) for size, few in AUTO_PAIRS if size <= rows]
        return sorted({*pairs, *((size, branches) for size in largest)})

    def branches(self, batch: Batch, first: Draft) -> Branches:
        return trees.tree_branches(batch.anchor, first, self.num_branches)


class FlexParallel(_Chained):
    name = "flex_parallel"
    topk = WIDTH  # a grammar may lead the draft in the next step
    uses_probabilities = False

    @classmethod
    def candidate_sizes(cls, block_size: int, rows: int) -> list[int]:
        """Chains shorter than a block too: every row of the tree is followed by a block of mask rows."""
        return [*(size for size in AUTO_SIZES if size < min(rows, block_size)), rows]


_POLICIES: dict[PolicyName, type[Policy]] = {
    policy.name: policy for policy in (Off, Lookup, Chain, Reanchor, D2SD, DDTree, Hybrid, FlexParallel)
}


def policy_class(name: PolicyName) -> type[Policy]:
    """The class of this name."""
    return _POLICIES[name]


def make_policy(name: PolicyName, *, block_size: int, branches: int, row_budget: int, lookup: bool = False) -> Policy:
    """The policy with at most `row_budget` nodes.

    Raises RecipeError if the budget is out of range or a block has fewer boundaries than `branches`.
    """
    kind = _POLICIES[name]
    if not 2 <= row_budget <= MAX_NODES and kind is not Off:
        raise RecipeError(
            "the node budget is out of range",
            where="tree.row_budget",
            found=row_budget,
            expected=f"2 .. {MAX_NODES}",
            fix="change it, or set tree.policy to off",
        )
    policy = kind.sized(block_size, branches, row_budget)
    return replace(policy, lookup=lookup and FACTS[name].copies)
