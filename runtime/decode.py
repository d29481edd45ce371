"""One decode step on the device: from the anchors of a batch to committed tokens.

    draft_first -> pick_boundaries -> draft_second -> build_tree -> verify -> accept -> commit

The engine calls this function, the policy selector times it, and a CUDA graph can capture it: inputs and outputs are
tensors, shapes depend on the batch bucket and the policy only, and no value is read back to the host. A batch with
grammars is the exception: the host reads the drafts and trees of their requests and uploads masks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from d2sd.plugins.lookup import Copy, find_copy
from d2sd.plugins.trees import Accepted, Branches, Draft, Source, Tree
from d2sd.policies import DrafterRole, DraftUse, FirstPass
from d2sd.runtime.batch import Batch
from d2sd.runtime.grammar.step import OFFERED, SPARE, StepGrammar, TreePaths
from d2sd.runtime.model_runner import ModelRunner, Verified
from d2sd.runtime.sampling.logprobs import pack_logprobs, unpack_logprobs
from d2sd.runtime.sequence import Sequence, TokenLogprobs
from d2sd.runtime.speculation.accept import sample_target
from d2sd.runtime.speculation.calibration import Calibration, default_scores
from d2sd.runtime.speculation.policy import Policy

#: Gives a context manager that times the stage of this name.
Timer = Callable[[str], AbstractContextManager[object]]


class Committed(NamedTuple):
    """Tokens that one step committed for one request."""

    length: int  # of `tokens`, 1 .. γ
    accepted_branch: int  # see `Accepted`
    tokens: list[int]
    logprobs: list[TokenLogprobs]  # of `tokens`; empty unless a request of the batch asks


class Drafted(NamedTuple):
    """Trees to verify, and the drafts that they were made of."""

    first: Draft | None
    branches: Branches | None
    second: Draft | None
    copy: Copy | None
    tree: Tree
    paths: TreePaths | None  # of requests with a grammar


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tensors of one decode step; a captured step overwrites them when it runs again."""

    drafted: Drafted
    accepted: Accepted
    packed: Tensor  # [B, 2 + G] int64, `Accepted.packed`, then `pack_logprobs`: all the host reads

    def read(self) -> list[Committed]:
        """Reads what the step committed, for each row of the batch; waits for the device."""
        return self.unpack(self.packed.cpu())

    def unpack(self, host: Tensor) -> list[Committed]:
        """See `read`; takes a copy of `packed` on the host."""
        size, committed = 2 + self.accepted.path.shape[1], []
        for row, (count, branch, *tokens) in zip(host[:, size:], host[:, :size].tolist(), strict=True):
            logprobs = unpack_logprobs(row.view(size - 2, -1), tokens[:count]) if len(row) else []
            committed.append(Committed(count, branch, tokens[:count], logprobs))
        return committed


@torch.inference_mode()
def decode_step(
    runner: ModelRunner,
    policy: Policy,
    batch: Batch,
    calibration: Calibration | None = None,
    timer: Timer = nullcontext,
) -> StepResult:
    """Draft, verify and commit 1 .. γ tokens for every request of `batch`.

    The context of the policy's drafters must be in their pages (`DrafterContext.inject`). `calibration` maps the
    drafters' probabilities to acceptance probabilities.
    """
    drafted = draft_trees(runner, policy, batch, calibration, timer)
    tree, mode = drafted.tree, runner.parallel if policy.first_pass is FirstPass.CARRIED else None
    with timer("verify"):
        verified = runner.verify(batch, tree, None if mode is None else mode.head.joining)
    mask = _mask(batch.grammar, drafted.paths, tree, verified.logits, timer)
    with timer("accept"):
        how = batch.where.context_len, batch.sampling, min(runner.block_size, policy.num_nodes), mask, verified.places
        accepted = sample_target(tree, verified.logits, *how, static_shapes=runner.static_shapes)
    with timer("commit"):
        runner.commit(batch, verified, accepted)
        if mode is not None:
            mode.keep(batch, verified, accepted)
    return StepResult(drafted, accepted, _packed(batch, verified, accepted))


def draft_trees(
    runner: ModelRunner,
    policy: Policy,
    batch: Batch,
    calibration: Calibration | None = None,
    timer: Timer = nullcontext,
) -> Drafted:
    """Draft a tree for every request of `batch`: the first part of `decode_step`, which has the same arguments.

    Engines that verify trees themselves call it alone.
    """
    calibrated = calibration.apply if calibration is not None and policy.uses_probabilities else _uncalibrated
    offered = policy.topk if batch.grammar is None else max(policy.topk, OFFERED)
    guided = partial(_guided, batch.grammar, policy.topk, timer)
    first, branches, second = None, None, None
    if policy.first_pass is FirstPass.DRAFTER:
        with timer("draft_first"):
            first = runner.drafts.first(batch, offered)
        first = calibrated(guided(first), batch, policy.first_use)
    elif policy.first_pass is FirstPass.PROMPT_LOOKUP:
        first = guided(_copied(runner, batch, None, calibration, timer).draft)
    elif policy.first_pass is FirstPass.CARRIED and runner.parallel is not None:
        with timer("draft_first"):
            first = runner.parallel.take(batch)
        first = guided(first)
    if first is not None and policy.second_pass is not None:
        with timer("pick_boundaries"):
            branches = _boundaries(runner, policy, policy.second_pass, batch, first)
        with timer("draft_second"):
            second = runner.drafts.second(batch, branches, policy.second_pass, offered)
        second = calibrated(guided(second, branches), batch, policy.second_use, branches)
    copy = _copied(runner, batch, first, calibration, timer) if policy.lookup else None
    tree, paths = _built(policy, batch, sources_of(first, branches, second, copy), timer)
    if batch.rows is not None and runner.static_shapes:
        tree = replace(tree, rows=batch.rows)  # acceptance keeps to them
    elif batch.rows is not None and int(batch.rows.min()) < policy.num_nodes:
        tree = tree.cut(batch.rows)
    return Drafted(first, branches, second, copy, tree, paths)


def _boundaries(runner: ModelRunner, policy: Policy, drafter: DrafterRole, batch: Batch, first: Draft) -> Branches:
    """Restart points of the second pass: where its block, which may be smaller than the first's, has a slot left."""
    drafts, slots = runner.drafts.blocks[drafter].drafts, runner.block_size - 1
    if drafts == slots:
        return policy.branches(batch, first)
    branches = policy.branches(batch, first.cut(drafts))
    return replace(branches, prefix_len=branches.prefix_len.where(branches.prefix_len < drafts, slots))


def _uncalibrated(draft: Draft, batch: Batch, use: DraftUse, branches: Branches | None = None) -> Draft:
    """In place of `Calibration.apply`: leaves the drafter's probabilities unchanged."""
    return draft


def _guided(
    grammar: StepGrammar | None, width: int, timer: Timer, draft: Draft, branches: Branches | None = None
) -> Draft:
    """The draft led along the grammars of the batch, if there are any, with `width` candidates a slot."""
    if grammar is None:
        return draft
    with timer("grammar"):
        return grammar.guide(draft, width, branches)


def sources_of(
    first: Draft | None, branches: Branches | None = None, second: Draft | None = None, copy: Copy | None = None
) -> list[Source]:
    """Sources of a step's tree: behind its branches the second draft takes the place of the first, and a copy of
    earlier text competes with both.
    """
    found = [] if first is None else [Source(first)]
    if second is not None:
        found.append(Source(second, branches, replaces=True))
    return found if copy is None else [*found, Source(copy.draft, follows=True)]


def _copied(
    runner: ModelRunner, batch: Batch, first: Draft | None, calibration: Calibration | None, timer: Timer
) -> Copy:
    """A copy of each request's earlier text; the first draft says how likely its tokens are."""
    scores = None if calibration is None else calibration.copies
    with timer("lookup"):
        scores = scores or default_scores(runner.block_size - 1, runner.device)
        return find_copy(runner.text(batch), first or runner.drafts.nothing(batch), scores, batch.sampling.temperature)


def _built(policy: Policy, batch: Batch, sources: list[Source], timer: Timer) -> tuple[Tree, TreePaths | None]:
    """The tree of `policy`; trees of constrained requests are taken from larger ones, to stay inside their grammars."""
    with timer("build_tree"):
        tree = policy.build(batch, sources)
        if batch.grammar is None:
            return tree, None
        candidates = sum(source.rows * source.draft.tokens.shape[-2] for source in sources)  # if a slot has one
        larger = replace(policy, num_nodes=max(SPARE * policy.num_nodes, 1 + candidates)).build(batch, sources)
    with timer("grammar"):
        return batch.grammar.prune(tree, larger)


def _mask(
    grammar: StepGrammar | None, paths: TreePaths | None, tree: Tree, logits: Tensor, timer: Timer
) -> Tensor | None:
    """The mask of `sample_target`. On a GPU the host walks the leaves while the target verifies the trees."""
    if grammar is None or paths is None:
        return None
    batch, nodes = tree.tokens.shape
    with timer("grammar"):
        return grammar.mask(paths, batch, nodes, logits.shape[-1]).to(logits.device)


def _packed(batch: Batch, verified: Verified, accepted: Accepted) -> Tensor:
    """`StepResult.packed`, with log-probabilities if a request asks for them."""
    packed = accepted.packed()
    if batch.sampling.logprobs is None:
        return packed
    of_rows = torch.arange(len(packed), device=packed.device)[:, None]
    logits = verified.at(of_rows, accepted.path).float()
    found = pack_logprobs(logits, accepted.tokens.clamp(min=0), batch.sampling.logprobs)
    return torch.cat([packed, found.flatten(1)], dim=1)


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The tensors of one decode step, for callers that draw or count them; see `Engine.record_trace`."""

    sequences: tuple[Sequence, ...]
    policy: Policy
    first: Draft | None
    branches: Branches | None
    tree: Tree
    accepted: Accepted
    copy: Copy | None = None
