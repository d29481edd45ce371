"""Inputs and outputs of the tree ops: drafts, where they attach, sources of candidates, trees, accepted paths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

# Shape letters: B requests, K branches, S = γ - 1 slots after the anchor, M candidates a slot, G block size γ, N nodes
# (the node budget). Tokens are the target's ids everywhere.

#: What falls back, in its report.
OP = "the draft tree"


@dataclass(frozen=True, slots=True)
class Draft:
    """Slot s proposes tokens for position anchor + 1 + s."""

    tokens: Tensor  # [B, (K,) S, M] int64, best first; where that depends on the slot before, behind its best
    #: [B, (K,) S, M] fp32: of acceptance, given that all tokens before it are; -inf: no proposal
    logprob: Tensor
    #: [B, (K,) S, 1 + M, M] fp32: the same behind a token that is not known, or known to the pass, then behind each
    #: candidate of the slot before. None: it does not depend on that.
    behind: Tensor | None = None

    @property
    def table(self) -> Tensor:
        """`behind`, or `logprob` alone: [B, (K,) S, P, M]."""
        return self.logprob[..., None, :] if self.behind is None else self.behind

    def padded(self, slots: int, token: int) -> Draft:
        """The draft with no proposals, of this token, up to `slots` of them."""
        missing = slots - self.tokens.shape[-2]
        if not missing:
            return self
        room = (0, 0, 0, missing)
        behind = None if self.behind is None else pad(self.behind, (0, 0, *room), value=-math.inf)
        return Draft(pad(self.tokens, room, value=token), pad(self.logprob, room, value=-math.inf), behind)

    def cut(self, slots: int) -> Draft:
        """A first draft [B, S, M] without proposals behind its first `slots`; of the same shape."""
        cut = self.part(slice(None), slice(slots)).padded(self.tokens.shape[-2], 0)
        return replace(cut, tokens=self.tokens)

    def part(self, *index: int | slice) -> Draft:
        """The draft at an index of the leading axes."""
        return Draft(self.tokens[index], self.logprob[index], None if self.behind is None else self.behind[index])

    @property
    def top1(self) -> Tensor:
        """The likeliest token of every slot, [B, (K,) S]."""
        return self.tokens[..., 0]

    @property
    def confidence(self) -> Tensor:
        """Log-probability of the likeliest token of every slot, [B, (K,) S]."""
        return self.logprob[..., 0]

    def chain(self, row: int) -> list[int]:
        """The likeliest tokens of request `row` (of a first pass, [B, S, M]), up to the first slot without a proposal.

        Reads both tensors back to the host.
        """
        tokens: list[int] = self.top1[row].tolist()
        confidence: list[float] = self.confidence[row].tolist()
        return tokens[: next((slot for slot, score in enumerate(confidence) if score == -math.inf), len(tokens))]


@dataclass(frozen=True, slots=True)
class Branches:
    """Restart points of the second pass: after the anchor and `prefix_len` tokens taken from the first pass."""

    tokens: Tensor  # [B, K, S] int64; those past `prefix_len` are unused
    prefix_len: Tensor  # [B, K] int64, 0 .. S; at S nothing is left to draft
    rejected: Tensor  # [B, K] int64, the token presumed rejected in slot `prefix_len`; -1: none


@dataclass(frozen=True, slots=True)
class Source:
    """Candidates for the nodes of a tree: the first draft, a second one behind its branches, copies of earlier text.

    Each branch is a row of candidates; a source at the root has one. Rows are numbered over all sources of a tree.
    """

    draft: Draft  # [B, S, M] at the root, [B, K, S, M] behind `branches`
    branches: Branches | None = None  # None: every path is continued, from the root on
    replaces: bool = False  # behind its branches the source before it proposes no more; otherwise both do
    follows: bool = False  # a row continues only paths that took its likeliest tokens, as a copy of text does

    @property
    def rows(self) -> int:
        """K, or 1 at the root."""
        return 1 if self.branches is None else self.branches.prefix_len.shape[1]


def lanes(sources: Sequence[Source]) -> list[int]:
    """The lane of every source. A path is continued by one row of each lane at a time."""
    return [lane - 1 for lane in accumulate(int(not place or not s.replaces) for place, s in enumerate(sources))]


#: Bits of a row's number, from 1, in what the kernel of growth knows of a path; and of all that it can know.
ROW_BITS, PATH_BITS = 6, 64


def path_bits(lanes: int, rows: int) -> int:
    """Bits of what that kernel knows of a path: the number of a row for each lane and for the last node, and a bit for
    each row, whose prefix the path may have so far.
    """
    return ROW_BITS * (lanes + 1) + rows


@dataclass(frozen=True, slots=True)
class Tree:
    """N nodes a request; entries past the last node are padding: not valid, and they attend to themselves only."""

    tokens: Tensor  # [B, N] int64
    parent: Tensor  # [B, N] int64, always smaller than the node's own index; the root's is 0
    depth: Tensor  # [B, N] int64, 0 at the root
    valid: Tensor  # [B, N] bool
    attn_mask: Tensor  # [B, N, N] bool: ancestors and self
    branch_id: Tensor  # [B, N] int64: the row of a source that proposed it, or the candidate; 0 is the first
    score: Tensor  # [B, N] fp32, log-probability of the node's path by the drafters; -inf in padding
    num_merged: Tensor  # [B] int64, tokens of candidates that share an existing node
    rows: Tensor | None = None  # [B] int64, leading nodes that may be accepted, the root always; None: all

    @staticmethod
    def empty(batch: int, nodes: int, device: torch.device | str = "cpu") -> Tree:
        """For an implementation to fill in."""
        tokens, parent, depth, branch_id = torch.empty(4, batch, nodes, dtype=torch.long, device=device).unbind(0)
        return Tree(
            tokens,
            parent,
            depth,
            torch.empty(batch, nodes, dtype=torch.bool, device=device),
            torch.empty(batch, nodes, nodes, dtype=torch.bool, device=device),
            branch_id,
            torch.empty(batch, nodes, dtype=torch.float32, device=device),
            torch.empty(batch, dtype=torch.long, device=device),
        )

    def cut(self, rows: Tensor) -> Tree:
        """The root and the first `rows` [B] nodes, which are the tree of that budget; the others stay in the mask."""
        valid = self.valid & (torch.arange(self.tokens.shape[1], device=rows.device) < rows.clamp(min=1)[:, None])
        return replace(self, valid=valid, score=self.score.where(valid, -math.inf), rows=None)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted path of each request."""

    path: Tensor  # [B, G] int64, node indices from the root; 0 past its end
    count: Tensor  # [B] int64, its length 1 .. γ: rows to commit, and new tokens (the bonus included)
    tokens: Tensor  # [B, G] int64, the target's choice at each node of the path: `count` new tokens, the rest unused;
    # below 0 where there is none to choose, on a path only at its end
    accepted_branch: Tensor  # [B] int64, `Tree.branch_id` of the path's last node
    row: Tensor | None = None  # `packed`, where the others are views of it

    def matches(self, row: int, drafted: list[int]) -> int:
        """Length of the prefix of `drafted` that equals the target's choices for request `row`, bonus included."""
        chosen: list[int] = self.tokens[row, : self.count[row]].tolist()
        pairs = zip(drafted, chosen, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(chosen)))

    def packed(self) -> Tensor:
        """Everything the host reads after a step, in one tensor [B, 2 + G]: count, accepted branch, tokens."""
        if self.row is not None:
            return self.row
        return torch.cat([self.count[:, None], self.accepted_branch[:, None], self.tokens], dim=1)
