"""One request in one step as plain data, read from the tensors of a trace; the only input of the pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from d2sd.policies import FirstPass

if TYPE_CHECKING:
    from d2sd.runtime.decode import StepTrace

Source = Literal["anchor", "first", "second", "copy", "bonus"]
#: Sources that propose with a probability.
DRAFTED = ("first", "second", "copy")


@dataclass(frozen=True, slots=True)
class Node:
    """A token of the tree, and whether it was accepted."""

    text: str
    parent: int  # index of the parent, less than the node's own; -1 for the anchor
    depth: int  # tokens after the anchor
    source: Source  # what drafted it
    branch: int  # k >= 1: the k-th branch; 0: no branch
    probability: float  # drafted probability of acceptance given its parent; 1 for anchor and bonus
    accepted: bool  # part of the answer
    chain: bool  # on the path of the first draft's top-1 tokens


@dataclass(frozen=True, slots=True)
class Step:
    """A tree after verification."""

    nodes: tuple[Node, ...]  # the anchor, the drafted tokens, the bonus token unless the answer ended before it
    draft: tuple[str, ...]  # the first draft: top-1 token of every slot
    right: int  # length of the prefix of `draft` that matches the target
    rows: int  # tree rows computed by the target, padding included
    copied: bool = False  # the first draft is a copy of earlier text
    end: bool = False  # its last token ends the answer and has no text

    @property
    def gained(self) -> tuple[Node, ...]:
        """The tokens of the step in their order: accepted drafts, then the bonus token."""
        return tuple(node for node in self.nodes[1:] if node.accepted)

    @property
    def accepted(self) -> tuple[Node, ...]:
        """The accepted drafts in their order."""
        return tuple(node for node in self.gained if node.source != "bonus")

    @property
    def bonus(self) -> Node | None:
        """The target's own token; None if the answer ended with a draft before it."""
        return self.nodes[-1] if self.nodes[-1].source == "bonus" else None

    @property
    def saved(self) -> int:
        """Tokens beyond those of the first draft's top-1 chain; the step was rescued if this is positive."""
        return max(0, len(self.accepted) - self.right)

    @property
    def miss(self) -> int | None:
        """Index of the first rejected node on the first draft's top-1 chain; None if there is none."""
        depth = self.right + 1
        return next((i for i, n in enumerate(self.nodes) if n.chain and n.depth == depth and not n.accepted), None)

    @property
    def saver(self) -> Source | None:
        """Source that rescued the step: of its last draft if that is a copy, else the second pass if it has a part."""
        if not self.saved:
            return None
        if self.accepted[-1].source == "copy":
            return "copy"
        return "second" if any(node.source == "second" for node in self.accepted) else "first"


def read_step(trace: StepTrace, row: int, show: Callable[[int], str], kept: int | None = None) -> Step:
    """Read the step of the request at `row` of the batch; `show` turns a token id into text.

    `kept`: tokens of the step in an answer that ended with it, 1 or more; what is behind them is left out. None: all.
    """
    tree, count = trace.tree, int(trace.accepted.count[row])
    chosen: list[int] = trace.accepted.tokens[row, :count].tolist()
    path: list[int] = trace.accepted.path[row, :count].tolist()
    draft = [] if trace.first is None else trace.first.chain(row)
    drafts = count - 1 if kept is None else min(kept, count - 1)  # the bonus token is none, even if it was drafted
    ended = kept is not None and kept < count  # with a draft
    right = min(trace.accepted.matches(row, draft), drafts)
    if ended and right == drafts:
        draft = draft[:right]

    copied = trace.policy.first_pass is FirstPass.PROMPT_LOOKUP
    tokens, parents, depths = tree.tokens[row].tolist(), tree.parent[row].tolist(), tree.depth[row].tolist()
    origins, scores, valid = tree.branch_id[row].tolist(), tree.score[row].tolist(), tree.valid[row].tolist()
    index: dict[int, int] = {}  # row of the tree -> index of the node, without padding rows
    nodes: list[Node] = []
    for number in (i for i, there in enumerate(valid) if there):
        if nodes and (parents[number] not in index or (ended and parents[number] == path[drafts])):
            continue  # behind the end of the answer
        index[number] = len(nodes)
        if not nodes:
            nodes.append(Node(show(tokens[number]), -1, 0, "anchor", 0, 1.0, True, True))
            continue
        above, depth = index[parents[number]], depths[number]
        # Branches that draft the same token share a node, with the score of the first of them: a child from another
        # branch may have a higher score.
        probability = math.exp(min(0.0, scores[number] - scores[parents[number]]))
        proposer = trace.policy.proposer(origins[number])
        source: Source = "copy" if copied or proposer < 0 else "first"
        if proposer > 0 and trace.branches is not None:
            source = "second"
        chain = nodes[above].chain and depth <= len(draft) and tokens[number] == draft[depth - 1]
        nodes.append(
            Node(show(tokens[number]), above, depth, source, max(0, proposer), probability, number in path, chain)
        )
    if not ended:
        nodes.append(Node(show(chosen[-1]), index[path[-1]], count, "bonus", 0, 1.0, True, False))
    return Step(tuple(nodes), tuple(map(show, draft)), right, len(tokens), copied)


def token_text(decode: Callable[[list[int]], str]) -> Callable[[int], str]:
    """The text of one token in the middle of a text.

    Tokenizers like Llama 2's drop the space before the first token, so the token is decoded after itself.
    """

    @cache
    def show(token: int) -> str:
        alone = decode([token])
        return decode([token, token])[len(alone) :] or alone

    return show
