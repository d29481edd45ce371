"""FlexDraft's parallel mode, all of it: a step drafts for the next one, behind every node that it verifies.

    take     the draft that the step before made for each anchor
    verify   the target's pass, which a block of mask rows joins behind every node, in case the path ends there
    keep     the block behind the last accepted node, corrected by the bonus token: the next step's draft

A block sees what its node sees, the node and itself, so the one that is used equals the block of sequential mode, on a
CPU to the bit. Anchored heads have no such mode: mask rows behind a node do not know what follows it.

Drafts stay on the device, one a page of K/V: that of the last committed token, which has one owner. A draft is used if
position and anchor are those it was made for, so nothing is to drop after steps of another policy, or with a page.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.interface import Tables
from d2sd.modeling.kv_pool import KVPool
from d2sd.modeling.where import Where
from d2sd.plugins.choice import WIDTH, candidates
from d2sd.plugins.trees import Accepted, Draft
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch

if TYPE_CHECKING:
    from d2sd.runtime.model_runner import ModelRunner, Verified

# Shape letters: B requests, P pages, S slots after the anchor, W candidates of a slot.


def parallel_mode(runner: ModelRunner) -> ParallelMode | None:
    """The mode of a runner whose pools are allocated; None: its first drafter has none."""
    role = DrafterRole.FIRST
    head = runner.drafters.get(role)
    if not isinstance(head, FlexHead) or head.config.anchored:
        return None
    shape = runner.page_counts[0], runner.block_size - 1, runner.drafts.width(WIDTH)
    return ParallelMode(head, runner.drafts.tables[role], runner.target_pool, shape)


class ParallelMode:
    """A head that joins the passes of a target, and the drafts that they leave to the next step."""

    def __init__(self, head: FlexHead, tables: Tables, pool: KVPool, shape: tuple[int, int, int]) -> None:
        """`pool` has the target's pages; `shape` is P, S, W."""
        self.head, self._tables, self._pool = head, tables, pool
        self._tokens = torch.zeros(shape, dtype=torch.long, device=pool.device)
        self._logprob = torch.zeros(shape, device=pool.device)
        self._anchor = torch.full((shape[0], 2), -1, device=pool.device)  # position and token that a draft is for

    @property
    def tensors(self) -> list[Tensor]:
        """The drafts by page, which steps change."""
        return [self._tokens, self._logprob, self._anchor]

    def take(self, batch: Batch) -> Draft:
        """The first draft [B, S, W] of a step; nothing is proposed where the step before has made none."""
        page = self._page(batch.where)
        anchor = torch.stack([batch.where.context_len, batch.anchor], 1)
        made = (self._anchor[page] == anchor).all(1)[:, None, None]
        return Draft(self._tokens[page].where(made, 0), self._logprob[page].where(made, -math.inf))

    @torch.inference_mode()
    def keep(self, batch: Batch, verified: Verified, accepted: Accepted) -> None:
        """Keep the draft behind the last node of each accepted path, for the step that begins there."""
        assert verified.rows.joined is not None
        head, where, (_, slots, width) = self.head, batch.where.after(accepted.count), self._tokens.shape
        of_rows, last = torch.arange(len(batch.anchor), device=batch.anchor.device), accepted.count - 1
        hidden = verified.rows.joined[of_rows, accepted.path[of_rows, last]][:, None, 1:]
        token = accepted.tokens[of_rows, last]
        # an id below 0, at which the request has ended, is not in the table; there any row will do
        logits = head.logits(hidden, token.clamp(min=0)[:, None], self._tables)
        draft = candidates(logits, where.context_len, batch.sampling, width, head.draft_ids)
        draft = draft.padded(slots, head.mask_token_id).part(slice(None), 0)
        page = self._page(where).where(batch.active, 0)
        self._tokens[page], self._logprob[page] = draft.tokens, draft.logprob.float()
        self._anchor[page] = torch.stack([where.context_len, token], 1)

    def _page(self, where: Where) -> Tensor:
        """The page [B] of each request's last committed token; that of the first, where none is."""
        last = (where.context_len - 1).clamp(0, where.pages.shape[1] * self._pool.page_size - 1)
        return where.pages.gather(1, last[:, None] // self._pool.page_size)[:, 0]
