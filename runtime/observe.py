"""Outcome of drafts and tree nodes in one step, per request, as plain numbers for calibration and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from d2sd.plugins.lookup import length_entry, support_entry
from d2sd.plugins.trees import log_rejected
from d2sd.policies import DrafterRole, DraftUse
from d2sd.runtime.decode import StepTrace
from d2sd.runtime.engine import Engine
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.stats import COPY, FIRST_DRAFT


class CopyOutcome(NamedTuple):
    """A copied token, those before which were the target's, so that the target has decided about it."""

    length: int  # entry of its match in `LENGTHS`
    support: int  # entry of the first draft's probability for it, 0 for none, then as in `SUPPORT`
    slot: int
    accepted: bool  # the target chose it


class NodeOutcome(NamedTuple):
    """A node whose parent was accepted, so that the target has decided whether the node is accepted.

    A node behind a rejected token of the first draft is one only where the target rejected that token.
    """

    use: DraftUse  # its row in a calibration
    distance: int  # slots after the last token of the drafter's context; 0 the next one
    sibling: bool  # not the slot's best candidate
    logprob: float  # the drafter's log-probability given the parent, and what was rejected
    accepted: bool
    node: int  # its index in the tree: a tree with a smaller node budget may lack it

    @property
    def drafter(self) -> DrafterRole:
        """The drafter that the pass is made for."""
        return self.use.role

    @property
    def prob(self) -> float:
        """The drafter's probability."""
        return math.exp(self.logprob)


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One request in one step."""

    sequence: Sequence
    accepted: int  # tokens committed, bonus included
    chain: int  # leading tokens of the first draft's best candidates that equal the target's
    nodes: int
    num_merged: int
    rank: int | None  # index of the branch that restarts exactly where that chain ends; None: no branch does
    rescued: bool  # nodes of the second pass were accepted beyond that chain
    path: list[int]  # accepted nodes, without the root
    judged: list[NodeOutcome]
    copied: list[CopyOutcome]


def observe(trace: StepTrace) -> list[StepObservation]:
    """The observation of every request of a step."""
    return [_request(trace, row) for row in range(len(trace.sequences))]


def run_observed(engine: Engine, advance: Callable[[int], None] = lambda count: None) -> Iterator[StepObservation]:
    """Step `engine` until it is idle and yield an observation per request-step; `advance` gets finished requests."""
    while engine.busy:
        outputs = engine.step()
        if outputs and engine.trace is not None:
            yield from observe(engine.trace)
        advance(sum(output.finish is not None for output in outputs))


def _request(trace: StepTrace, row: int) -> StepObservation:
    tree, accepted = trace.tree, trace.accepted
    count = int(accepted.count[row])
    path = accepted.path[row, :count].tolist()
    nodes = int(tree.valid[row].sum())
    best = [] if trace.first is None else trace.first.chain(row)
    chain = accepted.matches(row, best)
    rank = None
    lengths: list[int] = []
    if trace.branches is not None:
        lengths = trace.branches.prefix_len[row].tolist()
        branch_tokens = trace.branches.tokens[row].tolist()
        prefixes = [tokens[:length] for tokens, length in zip(branch_tokens, lengths, strict=True)]
        rank = next((i for i, prefix in enumerate(prefixes) if prefix == best[:chain]), None)
    return StepObservation(
        trace.sequences[row],
        count,
        chain,
        nodes,
        int(tree.num_merged[row]),
        rank,
        trace.policy.proposer(int(accepted.accepted_branch[row])) > FIRST_DRAFT and count - 1 > chain,
        path[1:],
        _judged(trace, row, nodes, path, lengths, chain),
        _copied(trace, row, count),
    )


def _copied(trace: StepTrace, row: int, count: int) -> list[CopyOutcome]:
    copy, first = trace.copy, trace.first
    if copy is None or first is None or not copy.length[row]:
        return []
    tokens = copy.draft.top1[row]
    length, support = int(length_entry(copy.length)[row]), support_entry(first, copy.draft.top1)[row].tolist()
    matched = trace.accepted.matches(row, tokens.tolist())
    decided = range(min(matched + 1, count, len(tokens)))
    return [CopyOutcome(length, support[slot], slot, slot < matched) for slot in decided]


def _judged(
    trace: StepTrace, row: int, nodes: int, path: list[int], lengths: list[int], chain: int
) -> list[NodeOutcome]:
    tree, policy = trace.tree, trace.policy
    parent, depth = tree.parent[row, :nodes].tolist(), tree.depth[row, :nodes].tolist()
    proposers = [policy.proposer(branch) for branch in tree.branch_id[row, :nodes].tolist()]
    logprob = (tree.score[row] - tree.score[row].gather(0, tree.parent[row])).tolist()
    rejected = list[float]()  # of every slot, where branches stand behind a rejected token
    if trace.first is not None and policy.second_use.is_behind_rejected:
        rejected = log_rejected(trace.first.confidence[row]).tolist()
    on_path, has_child = set(path), set[tuple[int, int]]()
    outcomes = []
    for node in range(1, nodes):
        above = parent[node]
        branch = proposers[node]
        if branch == COPY:
            continue
        sibling = (above, branch) in has_child
        has_child.add((above, branch))
        if above not in on_path:
            continue
        use, said = policy.second_use if branch else policy.first_use, logprob[node]
        distance = depth[node] - 1 - (lengths[branch - 1] if branch else 0)
        if use.is_behind_rejected and distance == 0:
            if chain >= depth[node]:
                continue
            said = min(said - rejected[depth[node] - 1], 0.0)  # the score has fp32's rounding of both
        outcomes.append(NodeOutcome(use, distance, sibling, said, node in on_path, node))
    return outcomes
