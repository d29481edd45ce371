"""Runs the target and the drafters of one bundle over paged K/V pools, with the same code on CPU and CUDA.

Every method takes and returns tensors of shapes that depend only on the batch bucket and the policy, and none reads a
value back to the host, so a decode step from `draft_first` to `commit` can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from d2sd.errors import CheckpointError, RecipeError
from d2sd.modeling.decoder import DecoderOutput, TargetModel
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fp8 import kv_scales
from d2sd.modeling.fused import fuse
from d2sd.modeling.kv_pool import KVPool
from d2sd.modeling.packed import pack, reduced_head
from d2sd.modeling.rows import Chunks, CommittedRows, ContextRows, Rows
from d2sd.plugins import choice, trees
from d2sd.plugins.choice import WIDTH, candidates
from d2sd.plugins.trees import Accepted, Branches, Draft, Tree
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.capture import Capture, CudaGraphs
from d2sd.runtime.drafting.context import DrafterContext
from d2sd.runtime.sampling.sample import Sampling

# Shape letters: B requests, M pages a request (both buckets), G block size γ, S = γ - 1
# slots, K branches, N nodes, E hidden, V tokens, Vd of them in a draft vocabulary.

#: Block count whose tables are precomputed; larger passes grow them.
MOST_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's outputs at every node; nothing is committed yet."""

    logits: Tensor  # [B, N, V]: fp32, or the head's own type where kernels choose the tokens
    rows: DecoderOutput
    behind: Tensor | None = None  # [B, N, G, E], hidden states of the mask rows behind every node


class ModelRunner:
    """Runs the models of one bundle over paged K/V pools, on the device and in the dtype of the target."""

    def __init__(
        self,
        target: TargetModel,
        first: DraftModel | None = None,
        second: DraftModel | None = None,
        *,
        flex: FlexHead | None = None,
        block_size: int = 1,
        exact: bool = False,
    ) -> None:
        """`block_size` applies without drafters, to plain decoding and prompt lookup; drafters define their own.

        `flex` has joined the target. `exact`: the target's step is batch-invariant on CUDA (docs/accuracy.md); compiled
        CPU layers always are.

        Models are packed (CPU, `d2sd.modeling.packed`) or fused (CUDA, `d2sd.modeling.fused`) in place: they can serve,
        but not be saved or trained.
        Raises CheckpointError if the drafters differ in their target layers or block size.
        """
        assert first is not None or second is None
        if flex is not None and first is not None and flex.config.block_size != first.config.block_size:
            raise CheckpointError(
                "FlexDraft and the drafters differ in block_size", where="FlexDraft's config",
                found=flex.config.block_size, expected=first.config.block_size,
            )  # fmt: skip
        if first is not None and second is not None:
            for name in ("block_size", "target_layer_ids"):
                one, other = getattr(first.config, name), getattr(second.config, name)
                if one != other:
                    raise CheckpointError(
                        f"the two drafters differ in {name}",
                        where="the second drafter's config",
                        found=other,
                        expected=one,
                    )
        self.target, self.first, self.second, self.flex = target, first, second, flex
        self.vocab_size = target.config.vocab_size
        source = first or flex
        self.block_size = source.config.block_size if source else block_size
        weight = target.embed_tokens.weight
        self.device, self._dtype = str(weight.device), weight.dtype
        self.static_shapes = weight.device.type != "cpu"  # as a CUDA graph needs; a CPU leaves rows out instead
        #: Captures decode steps; None: their operators are launched one by one.
        self.capture: Capture | None = CudaGraphs(self.device) if weight.device.type == "cuda" else None
        self._drafters = [d for d in (first, second) if d is not None]
        if weight.device.type == "cpu":
            pack(target)
        else:
            fuse(target, exact=exact)
        for drafter in self._drafters:
            (pack if weight.device.type == "cpu" else fuse)(drafter)
        if flex is not None:
            (pack if weight.device.type == "cpu" else fuse)(flex, target)
        self._heads = self._draft_heads()
        if flex is not None:
            self._flex_head = target.logits if flex.draft_ids is None else reduced_head(target, flex.draft_ids)
        # Most candidates that a slot can have in both drafts, because both become one tree.
        self._widest = min([self.vocab_size, *(len(d.draft_ids) for d in self._drafters if d.draft_ids is not None)])
        self._aux_layer_ids = first.config.target_layer_ids if first else ()
        # Constants, built once: every op is a kernel launch on CUDA.
        self._slots = self._same_block = torch.empty(0, device=self.device)
        self._rows_of_blocks(MOST_BLOCKS)
        mask_token = first.config.mask_token_id if first else 0
        self._masks = torch.full((self.block_size - 1,), mask_token, device=self.device)

    def allocate(self, pages: int, page_size: int) -> None:
        """Allocate the K/V pools. Raises RecipeError if they do not fit in the device's memory."""
        try:
            self.pools = self._make_pools(pages, page_size, self.device)
        except RuntimeError:  # raised by PyTorch's allocators; on CUDA a subclass of it
            raise RecipeError(
                "The K/V pools do not fit in memory.", where="limits",
                found=f"{pages:,} pages of {self.page_bytes(page_size):,} bytes",
                fix="set limits.kv_memory, such as 0.8, or lower limits.max_batch or limits.max_context",
            ) from None  # fmt: skip
        self._target_pool, *self._pools = self.pools
        self.context = DrafterContext(self._drafters, self._pools, self._dtype)

    @property
    def pool_pages(self) -> int:
        """Pages of each pool, the scratch page 0 among them."""
        return self._target_pool.k.shape[1]

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of `page_size` tokens, in the pools of all models."""
        return sum(pool.k.nbytes + pool.v.nbytes for pool in self._make_pools(1, page_size, "meta"))

    def _make_pools(self, pages: int, page_size: int, device: str) -> list[KVPool]:
        models: list[TargetModel | DraftModel] = [self.target, *self._drafters]
        return [
            KVPool.for_body(model.config.body, pages, page_size, self._dtype, device, kv_scales(model))
            for model in models
        ]

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, lengths: Sequence[int], page_table: Tensor, context_len: Tensor) -> Tensor:
        """Compute and commit chunks of B prompts in one pass: `tokens [N]` are the chunks, concatenated.

        `lengths` are their numbers of tokens, of requests with `page_table [B, M]` and `context_len [B]` tokens before
        the chunk. Returns the target's hidden states [N, E], ready for the head.
        """
        rows = Chunks.of(lengths, page_table, context_len, self._target_pool.page_size)
        out: DecoderOutput = self.target(tokens[None], rows, self._target_pool, self._aux_layer_ids)
        self._target_pool.write_rows(out.k[:, 0], out.v[:, 0], rows.pages, rows.positions[0])
        self.context.add(ContextRows(out.features[0], rows.positions[0], rows.pages))
        return out.hidden[0]

    @torch.inference_mode()
    def draft_first(self, batch: Batch, width: int) -> Draft:
        """One block per request: [B, S, M] with M = `width`."""
        masks = self._masks.expand(len(batch.anchor), 1, -1)
        logits = self._draft(0, batch, torch.cat([batch.anchor[:, None, None], masks], dim=-1))
        draft = self._candidates(0, batch, logits, width)
        return Draft(draft.tokens[:, 0], draft.logprob[:, 0])

    @torch.inference_mode()
    def draft_second(self, batch: Batch, branches: Branches, drafter: int, width: int) -> Draft:
        """K branches per request, [B, K, S, M], by the first drafter (0) or the second (1)."""
        blocks = trees.restart_blocks(branches, batch.anchor, self._drafters[drafter].config.mask_token_id)
        logits = trees.mask_rejected(branches, self._draft(drafter, batch, blocks), self._drafters[drafter].draft_ids)
        return self._candidates(drafter, batch, logits, width)

    @torch.inference_mode()
    def draft_flex(self, batch: Batch, width: int) -> Draft:
        """One block per request by the target's own last layers, calibrated by the anchor: [B, S, M]."""
        assert self.flex is not None
        slots = torch.arange(self.block_size, device=batch.anchor.device)
        positions = batch.context_len[:, None] + slots
        everywhere = torch.ones_like(slots, dtype=torch.bool).expand(len(positions), len(slots), len(slots))
        rows = Rows(positions, everywhere, batch.page_table, batch.context_len)
        pool = self._target_pool.from_layer(self.flex.config.split_layer)
        anchor = self.target.embed_tokens(batch.anchor)
        hidden = self.flex.draft(self.flex.blocks(anchor), rows, pool)
        return self._flex_candidates(hidden, anchor, batch.context_len, batch.sampling, width)

    @torch.inference_mode()
    def verify(self, batch: Batch, tree: Tree) -> Verified:
        """The target over all nodes."""
        out = self.target(tree.tokens, _rows(batch, tree), self._target_pool, self._aux_layer_ids)
        return Verified(self._node_logits(out.hidden), out)

    @torch.inference_mode()
    def verify_and_draft(self, batch: Batch, tree: Tree) -> Verified:
        """`verify`, with FlexDraft's mask rows behind every node in the same pass."""
        assert self.flex is not None
        out, behind = self.flex.verify_and_draft(
            self.target, tree.tokens, _rows(batch, tree), self._target_pool, self._aux_layer_ids
        )
        return Verified(self._node_logits(out.hidden), out, behind)

    @torch.inference_mode()
    def draft_behind(self, batch: Batch, verified: Verified, accepted: Accepted, width: int) -> Draft:
        """The next step's block per request [B, S, M], of the mask rows behind the last accepted node."""
        assert verified.behind is not None
        of_rows, last = torch.arange(len(batch.anchor), device=batch.anchor.device), accepted.count - 1
        hidden = verified.behind[of_rows, accepted.path[of_rows, last]]
        # not a call of the table, which refuses numbers below 0: there the request ends, and any row will do
        anchor = self.target.embed_tokens.weight[accepted.tokens[of_rows, last]]
        return self._flex_candidates(hidden, anchor, batch.context_len + accepted.count, batch.sampling, width)

    @property
    def flex_width(self) -> int:
        """Candidates of every slot of a FlexDraft draft."""
        assert self.flex is not None
        return min(WIDTH, self.vocab_size if self.flex.draft_ids is None else len(self.flex.draft_ids))

    def _node_logits(self, hidden: Tensor) -> Tensor:
        return (self.target.raw_logits if choice.reads_any_type(hidden) else self.target.logits)(hidden)

    def _flex_candidates(
        self, hidden: Tensor, anchor: Tensor, context_len: Tensor, sampling: Sampling, width: int
    ) -> Draft:
        """hidden [B, G, E] of a block of mask rows behind `context_len [B]` tokens; anchor [B, E], embedded."""
        assert self.flex is not None
        hidden = hidden[:, 1:].contiguous()
        added = self.flex.calibrate(hidden, anchor[:, None])
        logits = self._flex_head(hidden).float() + added
        draft = candidates(logits[:, None], context_len, sampling, min(width, self.flex_width), self.flex.draft_ids)
        return Draft(draft.tokens[:, 0], draft.logprob[:, 0])

    @torch.inference_mode()
    def commit(self, batch: Batch, verified: Verified, accepted: Accepted) -> None:
        """Append the accepted path to the target's pages, and its features to the context of the drafters."""
        path = accepted.path  # [B, G]
        steps = self._slots[: path.shape[1]]
        keep = (steps < accepted.count[:, None]) & batch.active[:, None]
        of_rows = torch.arange(len(path), device=path.device)[:, None]
        out = verified.rows
        positions = batch.context_len[:, None] + steps
        self._target_pool.write(out.k, out.v, batch.page_table, positions, keep, path)
        features, page_size = out.features[of_rows, path], self._target_pool.page_size
        self.context.add(CommittedRows(features, batch.page_table, positions, keep, page_size))

    @property
    def constants(self) -> list[Tensor]:
        """Tensors that no step changes."""
        return [self._slots, self._same_block, self._masks]

    @property
    def drafters(self) -> int:
        """How many there are."""
        return len(self._drafters)

    @torch.inference_mode()
    def compute_context(self, drafter: int, rows: int) -> None:
        """The context K/V of some rows, to time it; nothing is written."""
        model = self._drafters[drafter]
        width = len(model.config.target_layer_ids) * model.config.body.hidden_size
        features = torch.zeros(1, rows, width, dtype=self._dtype, device=self.device)
        model.context_keys_values(features, torch.arange(rows, device=self.device)[None])

    def _draft(self, which: int, batch: Batch, blocks: Tensor) -> Tensor:
        """blocks [B, K, G], masked from each other -> logits [B, K, G-1, V or Vd] of slots 1 .. γ-1, in
        fp32, or in the head's own type where kernels read them.
        """
        context = self.context.take(which)
        drafter, pool = self._drafters[which], self._pools[which]
        _, count, size = blocks.shape
        slots, same_block = self._rows_of_blocks(count)
        attn_mask = same_block.expand(len(blocks), -1, -1)
        positions = batch.context_len[:, None] + slots
        rows = Rows(positions, attn_mask, batch.page_table, batch.context_len)
        embedded = self.target.embed_tokens(blocks.flatten(1))
        if context is None:
            hidden = drafter.draft(embedded, rows, pool)
        else:
            hidden = drafter.inject_and_draft(context, embedded, rows, pool)
        # contiguous: on a view PyTorch multiplies batch by batch, 60 times slower in bf16 on a CPU
        logits = self._heads[which](hidden.view(len(blocks), count, size, -1)[:, :, 1:].contiguous())
        return logits if choice.reads_any_type(logits) else logits.float()

    def _rows_of_blocks(self, count: int) -> tuple[Tensor, Tensor]:
        """Slot index [T] and same-block mask [T, T] of `count` concatenated blocks."""
        rows = count * self.block_size
        if rows > len(self._slots):  # tables for any number of blocks begin with those of fewer
            number = torch.arange(rows, device=self.device)
            block = number // self.block_size
            self._slots, self._same_block = number % self.block_size, block[:, None] == block
        return self._slots[:rows], self._same_block[:rows, :rows]

    def _candidates(self, which: int, batch: Batch, logits: Tensor, width: int) -> Draft:
        ids = self._drafters[which].draft_ids
        return candidates(logits, batch.context_len, batch.sampling, min(width, self._widest), ids)

    def _draft_heads(self) -> list[Callable[[Tensor], Tensor]]:
        """The head of each drafter, hidden states -> logits; drafters with the same draft vocabulary share one."""
        heads: dict[tuple[int, ...] | None, Callable[[Tensor], Tensor]] = {None: self.target.raw_logits}
        for drafter in self._drafters:
            ids = drafter.draft_ids
            if ids is not None and drafter.config.draft_vocabulary not in heads:
                heads[drafter.config.draft_vocabulary] = reduced_head(self.target, ids)
        return [heads[drafter.config.draft_vocabulary] for drafter in self._drafters]


def _rows(batch: Batch, tree: Tree) -> Rows:
    return Rows(batch.context_len[:, None] + tree.depth, tree.attn_mask, batch.page_table, batch.context_len)
