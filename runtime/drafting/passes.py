"""The drafters' passes over blocks: an anchor or a branch and masks behind it, for which candidates come out.

Places of rows and the masks among them are constants, made once: each op would be a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from d2sd.modeling.config import block_rows
from d2sd.modeling.decoder import TargetModel
from d2sd.modeling.draft_head import draft_tables
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.kv_pool import ContextRows, KVPool, Rows
from d2sd.plugins import choice, trees
from d2sd.plugins.cascade_attention import pack_mask_bits
from d2sd.plugins.layer_ops import Behind
from d2sd.plugins.trees import Branches, Draft
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch
from d2sd.runtime.drafting.context import DrafterContext
from d2sd.runtime.drafting.window import Window

# Shape letters: B requests, G most tokens of a step, S = G - 1 slots, R rows of a block, K blocks or branches of a
# request, T = K · R, M candidates, E hidden, V tokens, Vd of them in a draft vocabulary.

#: Blocks of a request whose constants are made in advance; passes of more make theirs.
MOST_BLOCKS = 16


class Block(NamedTuple):
    """The size of a drafter's blocks in rows, and the tokens that each proposes."""

    rows: int
    drafts: int


class DraftPasses:
    """Drafts for the requests of a batch, with the drafters of a runner."""

    def __init__(self, target: TargetModel, drafters: Mapping[DrafterRole, DraftModel], block_size: int) -> None:
        """`block_size` is G."""
        weight, configs = target.embed_tokens.weight, {role: drafter.config for role, drafter in drafters.items()}
        device, self._drafters, self._slots = str(weight.device), drafters, block_size - 1
        self.blocks = {
            role: Block(block_rows(config, block_size), min(config.drafts, self._slots))
            for role, config in configs.items()
        }
        self.tables = draft_tables(target, drafters)
        self.autoregressive = [role for role, drafter in drafters.items() if drafter.autoregressive]
        self.window: Window | None = None  # of the context that drafters read; None: all of it
        # Most candidates that a slot can have in every draft, because several become one tree.
        sizes = [len(config.draft_vocabulary) for config in configs.values() if config.draft_vocabulary is not None]
        self._widest = min([target.config.vocab_size, *sizes])
        of_blocks, in_bits = {block.rows for block in self.blocks.values()}, weight.device.type != "cpu"
        self._block_tables = {size: BlockTables(size, device, in_bits=in_bits) for size in of_blocks}
        nothing = torch.full((1, self._slots, 1), float("-inf"), device=device)
        self._nothing = torch.full_like(nothing, -1, dtype=torch.long), nothing
        self._masks = {
            role: torch.full((self.blocks[role].rows - 1,), drafter.mask_token_id, device=device)
            for role, drafter in drafters.items()
        }

    def read_from(self, target: KVPool, own: Mapping[DrafterRole, KVPool], context: DrafterContext) -> None:
        """Let drafters read their `own` pages, to which they write `context`; those without any read the target's."""
        self._pools, self._context = {role: own.get(role, target) for role in self._drafters}, context

    @torch.inference_mode()
    def first(self, batch: Batch, width: int) -> Draft:
        """One block of the first drafter per request: [B, S, M] with M = `width`."""
        role = DrafterRole.FIRST
        masks = self._masks[role].expand(len(batch.anchor), 1, -1)
        blocks = torch.cat([batch.anchor[:, None, None], masks], dim=-1)
        return self._candidates(role, batch, blocks, width).part(slice(None), 0)

    @torch.inference_mode()
    def second(self, batch: Batch, branches: Branches, role: DrafterRole, width: int) -> Draft:
        """K branches per request: [B, K, S, M]."""
        blocks = trees.restart_blocks(branches, batch.anchor, self._drafters[role].mask_token_id)
        if self.blocks[role].rows <= self._slots:
            blocks = blocks[..., : self.blocks[role].rows]
        return self._candidates(role, batch, blocks, width, branches)

    def extend(self, tokens: Tensor, rows: ContextRows, before: Tensor) -> None:
        """Let autoregressive drafters take committed tokens [N], and pages [N] of the positions before theirs."""
        for role in self.autoregressive:
            self._drafters[role].extend(tokens, rows, before, self._pools[role], self.tables[role])

    def nothing(self, batch: Batch) -> Draft:
        """A first draft [B, S, 1] that proposes nothing."""
        tokens, logprob = (part.expand(len(batch.anchor), -1, -1) for part in self._nothing)
        return Draft(tokens, logprob)

    def width(self, most: int) -> int:
        """Candidates that every slot of a draft has, if a policy takes up to `most`."""
        return min(most, self._widest)

    def _candidates(
        self, role: DrafterRole, batch: Batch, blocks: Tensor, width: int, branches: Branches | None = None
    ) -> Draft:
        """Candidates [B, K, S, M] of `blocks [B, K, R]`, of which one of masks alone has its anchor at least."""
        drafter, sampling = self._drafters[role], batch.sampling
        logits, hidden = self._pass(role, batch, blocks, branches)
        most = self.width(max(width, drafter.pool))
        draft = choice.candidates(logits, batch.where.context_len, sampling, most, drafter.draft_ids, branches)
        if drafter.pool:
            draft = drafter.conditioned(draft, hidden, blocks, sampling.temperature, self.width(width))
        return draft.padded(self._slots, drafter.mask_token_id)

    def _pass(
        self, role: DrafterRole, batch: Batch, blocks: Tensor, branches: Branches | None = None
    ) -> tuple[Tensor, Tensor]:
        """blocks [B, K, R], masked from each other -> logits [B, K, drafts, V or Vd] of their slots, in fp32, or in the
        head's own type where kernels read them; and their hidden states [B, K, drafts, E].
        """
        drafter, tables, pool = self._drafters[role], self.tables[role], self._pools[role]
        places, *masks = self._block_tables[blocks.shape[2]].of(blocks.shape[1])
        attn_mask, packed = (None if mask is None else mask.expand(len(blocks), -1, -1) for mask in masks)
        assert attn_mask is not None
        placed = Behind(batch.where.context_len, places.expand(len(blocks), -1))
        rows = Rows(placed, attn_mask, batch.where, packed=packed)
        if self.window is not None:
            rows = self.window.cut(rows, pool.page_size)
        if drafter.autoregressive:
            tables = tables._replace(choose=partial(_chosen, batch, branches, drafter.draft_ids))
        hidden = drafter.draft_hidden(blocks, rows, pool, self._context.take(role), tables)
        logits = drafter.logits(hidden, blocks[:, :, 0], tables)
        return logits if choice.reads_any_type(logits) else logits.float(), hidden


def _chosen(batch: Batch, branches: Branches | None, ids: Tensor | None, logits: Tensor, slot: int) -> Tensor:
    """See `Tables.choose`: the best candidate, which a chain takes."""
    if branches is not None:
        here = branches.rejected.where(branches.prefix_len == slot, -1)
        branches = replace(branches, prefix_len=torch.zeros_like(here), rejected=here)
    place = batch.where.context_len + slot
    return choice.candidates(logits, place, batch.sampling, 1, ids, branches).top1[..., 0]


class BlockRows(NamedTuple):
    """Constants of the rows of K blocks, one block behind the other."""

    places: Tensor  # [T] int64, in its block
    same_block: Tensor  # [T, T] bool
    words: Tensor | None  # [T, ceil(T / 32)] int32, `same_block` in bits; None where nothing reads them


class BlockTables:
    """The constants of blocks of `size` rows, up to any number of them."""

    def __init__(self, size: int, device: str, *, in_bits: bool) -> None:
        """`in_bits`: kernels read the masks."""
        self._size, self._device, self._in_bits = size, device, in_bits
        self._tables = [self._made(count) for count in range(1, MOST_BLOCKS + 1)]

    def of(self, count: int) -> BlockRows:
        """Rows of `count` blocks."""
        while count > len(self._tables):
            self._tables.append(self._made(len(self._tables) + 1))
        return self._tables[count - 1]

    def _made(self, count: int) -> BlockRows:
        number = torch.arange(count * self._size, device=self._device)
        block = number // self._size
        same_block = block[:, None] == block
        words = pack_mask_bits.reference(same_block[None])[0] if self._in_bits else None
        return BlockRows(number % self._size, same_block, words)
