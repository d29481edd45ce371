"""FlexDraft's parallel mode in a decode step: the pass that verifies a tree also drafts behind each of its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.parallel import verify_and_draft
from d2sd.plugins.choice import WIDTH
from d2sd.plugins.trees import Accepted, Draft, Tree
from d2sd.policies import DrafterRole
from d2sd.runtime.backends.model_runner import Verified, tree_rows
from d2sd.runtime.batch import Batch

if TYPE_CHECKING:
    from d2sd.runtime.backends.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class VerifiedAhead(Verified):
    """With what the head drafts behind every node."""

    behind: Tensor  # [B, N, G, E], hidden states of the mask rows


@torch.inference_mode()
def verify(runner: ModelRunner, batch: Batch, tree: Tree) -> VerifiedAhead:
    """The target over all nodes, and the head's mask rows behind each."""
    head = cast("FlexHead", runner.drafters[DrafterRole.FLEX])
    rows = tree_rows(batch, tree)
    out, behind = verify_and_draft(head, runner.target, tree.tokens, rows, runner.target_pool, runner.aux_layer_ids)
    return VerifiedAhead(runner.node_logits(out.hidden), out, behind)


@torch.inference_mode()
def draft_ahead(runner: ModelRunner, batch: Batch, verified: VerifiedAhead, accepted: Accepted) -> Draft:
    """The next step's block per request [B, S, M], of the mask rows behind the last accepted node."""
    role = DrafterRole.FLEX
    head = cast("FlexHead", runner.drafters[role])
    of_rows, last = torch.arange(len(batch.anchor), device=batch.anchor.device), accepted.count - 1
    hidden = verified.behind[of_rows, accepted.path[of_rows, last]][:, 1:].contiguous()
    # not a call of the table, which refuses numbers below 0: there the request ends, and any row will do
    anchor = runner.target.embed_tokens.weight[accepted.tokens[of_rows, last]]
    logits = head.corrected_logits(hidden, anchor[:, None], runner.tables(role))[:, None]
    draft = runner.candidates(role, batch.context_len + accepted.count, batch.sampling, logits, WIDTH)
    return Draft(draft.tokens[:, 0], draft.logprob[:, 0])
