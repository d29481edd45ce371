"""Runs the target and the drafters of one bundle over paged K/V pools, with the same code on CPU and CUDA.

Every pass takes and returns tensors of shapes that depend only on the batch bucket and the policy, and none reads a
value back to the host, so that a CUDA graph can hold a decode step from the first draft to `commit`. On a CPU, where
each row costs its full price, `verify` leaves the padding of trees out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from d2sd.errors import CheckpointError, D2SDError, RecipeError
from d2sd.modeling.config import DraftConfig
from d2sd.modeling.decoder import DecoderOutput, TargetModel
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.joining import Joining
from d2sd.modeling.kv_pool import Chunks, CommittedRows, ContextRows, PoolSizes, Rows, first_rows
from d2sd.modeling.where import Where
from d2sd.plugins import choice, handover, lookup
from d2sd.plugins.layer_ops import Behind
from d2sd.plugins.lookup import Text
from d2sd.plugins.trees import Accepted, Tree
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch, Prefilled
from d2sd.runtime.cuda_graphs.capture import Capture, CudaGraphs
from d2sd.runtime.drafting.context import DrafterContext
from d2sd.runtime.drafting.passes import DraftPasses
from d2sd.runtime.memory import context_bytes, free_memory
from d2sd.runtime.pools import PoolLayout
from d2sd.runtime.speculation.flex_parallel import parallel_mode
from d2sd.runtime.staging import Staging

# Shape letters: B requests, M pages a request (both padded), G most tokens of a step, N nodes, E hidden, V tokens.


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's outputs at every node; nothing is committed yet."""

    tokens: Tensor  # [B, N], of the nodes
    logits: Tensor  # [B, N, V], or [M, V] of some: fp32, or the head's own type where kernels choose the tokens
    rows: DecoderOutput
    places: Tensor | None = None  # [B, N], the row of each node in `logits [M, V]`; 0 in padding. None: all have one

    def at(self, request: Tensor | int, node: Tensor | int) -> Tensor:
        """The logits [..., V] at nodes [...]."""
        return self.logits[request, node] if self.places is None else self.logits[self.places[request, node]]


class ModelRunner:
    """Runs the models of one bundle over paged K/V pools, on the device and in the dtype of the target."""

    def __init__(
        self,
        target: TargetModel,
        drafters: Mapping[DrafterRole, DraftModel] | None = None,
        *,
        block_size: int | None = None,
    ) -> None:
        """`block_size` is G, the most tokens that a step commits: the drafts of a block and the bonus. A drafter whose
        blocks are larger runs smaller ones; the drafts of one whose blocks are smaller end earlier. None: as the
        largest block has; 1 without drafters.

        The models have been prepared (`prepare_for_inference`); where they have not, they are slower.
        Raises CheckpointError if the drafters differ in their target layers.
        """
        self.target, self.drafters = target, dict(drafters or {})
        self.vocab_size = target.config.vocab_size
        configs = {role: drafter.config for role, drafter in self.drafters.items()}
        self.block_size = block_size or 1 + max((config.drafts for config in configs.values()), default=0)
        self.drafts = DraftPasses(target, self.drafters, self.block_size)
        with_context = {role: config for role, config in configs.items() if self.drafters[role].has_context}
        self.aux_layer_ids: tuple[int, ...] = _common("target_layer_ids", with_context) or ()
        weight = target.embed_tokens.weight
        self.device, self._dtype = str(weight.device), weight.dtype
        self.static_shapes = weight.device.type != "cpu"  # as a CUDA graph needs; a CPU leaves rows out instead
        #: Captures decode steps; None: their operators are launched one by one.
        self.capture: Capture | None = CudaGraphs(self.device) if weight.device.type == "cuda" else None
        #: Copies the inputs of a prefill to the device; None: they are where they are computed on.
        self.staging = None if self.capture is None else Staging(self.device, self.capture.mark)
        self.text_pages: Tensor | None = None  # [P, Z] int64, the tokens whose K/V the pages hold; see `keep_text`
        #: Pages of each pool by page table, the scratch page 0 among them; set by `allocate`.
        self.page_counts: tuple[int, ...] = ()
        self.layout = PoolLayout(target, self.drafters.values(), self._dtype)

    def allocate(self, sizes: PoolSizes) -> None:
        """Allocate the K/V pools. Raises RecipeError if they do not fit in the device's memory."""
        try:
            self.pools = self.layout.make(sizes, self.device)
        except RuntimeError:  # raised by PyTorch's allocators; on CUDA a subclass of it
            raise RecipeError(
                "The K/V pools do not fit in memory.",
                where="limits",
                found=f"{sizes.pages:,} pages of {self.layout.bytes_of(sizes.page_size).page:,} bytes",
                fix="set limits.kv_memory, such as 0.8, or lower limits.max_batch or limits.max_context",
            ) from None
        self.text_pages, self.page_counts = None, sizes.counts
        self.target_pool, *pools = self.pools
        own = dict(zip((role for role, each in self.drafters.items() if each.has_context), pools, strict=True))
        late = {role: self.drafters[role] for role in own if role not in self.drafts.autoregressive}
        self.context = DrafterContext(late, {role: own[role] for role in late}, self._dtype)
        self.drafts.read_from(self.target_pool, own, self.context)
        self.parallel = parallel_mode(self)

    def free_memory(self, requests: int) -> int:
        """Bytes that pools may take where the models are: what is free, less the drafters' context of so many requests,
        which is not planned on a CPU. Raises RecipeError if the system does not report it.
        """
        width = len(self.aux_layer_ids) * self.target.config.body.hidden_size if self.static_shapes else 0
        waiting = context_bytes(width * self._dtype.itemsize, requests * self.block_size)
        return max(0, free_memory(self.device) - waiting)

    def drop(self, *pages: Sequence[int]) -> None:
        """Give up the K/V of these pages, of each page table; call it before they are written again."""
        self.context.drop(*pages)

    def scratch(self, requests: int, columns: int, context_len: int = 0) -> Where:
        """See `Where.scratch`; with the page tables and states of these pools."""
        windowed, states = len(self.page_counts) > 1, self.layout.state_bytes > 0
        return Where.scratch(requests, columns, context_len, windowed=windowed, states=states)

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor to the host; the function returned waits for it."""
        return (lambda: tensor) if self.capture is None else self.capture.fetch(tensor)

    def prompt_logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [R, V] in fp32 behind rows [R, E] of `prefill`."""
        return self.target.logits(hidden)

    def on_failure(self, report: Callable[[D2SDError], None]) -> None:
        """Call `report`, in any thread, when a process ends that the runner needs; it needs none."""

    @property
    def exchanged(self) -> Mapping[str, int]:
        """Bytes exchanged with other processes so far, by collective."""
        return {}

    def close(self) -> None:
        """Free what other processes have for it."""

    @torch.inference_mode()
    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent states, from id to id, all at once; state 0 is that of a request without tokens."""
        if copies and self.target_pool.states is not None:
            pairs = torch.tensor(copies)
            if self.staging is not None:
                (pairs,) = self.staging([pairs])
            self.target_pool.states.copy(*pairs.unbind(1))

    @torch.inference_mode()
    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], where: Where, following: Tensor | None = None
    ) -> Prefilled:
        """Compute and commit chunks of B prompts in one pass: `tokens [N]`, of which chunk b has the next `lengths[b]`
        behind the context of request b. All are on the host, and go to the device in one copy: nothing here waits for
        it.
        """
        rows = Chunks.of(lengths, where, self.target_pool.page_size)
        if self.staging is not None:
            behind = [] if following is None else [following]
            tokens, *found = self.staging([tokens, *behind, *rows.tensors])
            following = found.pop(0) if behind else None
            rows = rows.with_tensors(found)
        hidden, features = self.prefill_rows(tokens, rows)
        self.keep_rows(tokens, ContextRows(features, rows.positions[0], rows.pages))
        return Prefilled(hidden, following)

    @torch.inference_mode()
    def prefill_rows(self, tokens: Tensor, rows: Chunks) -> tuple[Tensor, Tensor]:
        """The part of `prefill` that a graph holds: commits K/V; gives hidden states [N, E] and features [N, n·E]."""
        out: DecoderOutput = self.target(tokens[None], rows, self.target_pool, self.aux_layer_ids)
        self.target_pool.write_rows(out.k[:, 0], out.v[:, 0], rows.pages, rows.positions[0])
        return out.hidden[0], out.features[0]

    def keep_rows(self, tokens: Tensor, rows: ContextRows) -> None:
        """The rest of `prefill`: keeps the text, and these tensors for the drafters' context."""
        if self.text_pages is not None:
            self.text_pages[rows.pages[0], rows.positions % self.target_pool.page_size] = tokens
        self.context.add(rows._replace(pages=rows.pages[: self.context.tables]))
        self.drafts.extend(tokens, rows, rows.pages[-1])

    @torch.inference_mode()
    def verify(self, batch: Batch, tree: Tree, joining: Joining | None = None) -> Verified:
        """The target over all nodes, and what joins behind them; on a CPU, without those that pad a tree."""
        needed = None if self.static_shapes else _nodes(tree)
        placed = Behind(batch.where.context_len, tree.depth)
        rows = Rows(placed, tree.attn_mask, batch.where, needed, joining=joining)
        out: DecoderOutput = self.target(tree.tokens, rows, self.target_pool, self.aux_layer_ids)
        hidden, places = out.hidden, None
        if needed is not None:
            kept = first_rows(needed, tree.tokens.shape[1])
            hidden, places = hidden.flatten(0, 1)[kept], torch.zeros_like(tree.tokens)
            places.view(-1)[kept] = torch.arange(len(kept))
        logits = (self.target.raw_logits if choice.reads_any_type(hidden) else self.target.logits)(hidden)
        return Verified(tree.tokens, logits, out, places)

    @torch.inference_mode()
    def commit(self, batch: Batch, verified: Verified, accepted: Accepted) -> None:
        """Append the accepted path to the target's pages and to the text, and its features to the drafters' context."""
        path, out, where = accepted.path, verified.rows, batch.where  # [B, G]
        tables = where.tables[: self.context.tables]
        room = self.context.room(len(path))
        into = None if room is None else [room.features, room.positions, room.keep, *room.tables]
        of_batch = accepted.count, batch.active, where.context_len
        features, positions, keep = handover.commit(path, *of_batch, out.features, tables, into)
        out.commit(self.target_pool, where, positions, keep, path)
        rows = CommittedRows(features, tables, positions, keep, self.target_pool.page_size)
        self.context.add(room or rows)
        if self.drafts.autoregressive:
            kept = slice(None) if self.static_shapes else keep.flatten()
            features, positions, (pages, *_) = rows.rows
            found = ContextRows(features[kept], positions[kept], (pages[kept],))
            self.drafts.extend(verified.tokens.gather(1, path).flatten()[kept], found, rows.before[kept])
        if self.text_pages is not None:
            lookup.append(self.text(batch), verified.tokens, accepted, batch.active)

    def keep_text(self) -> None:
        """Keep the tokens of all requests from now on, in the pages of their K/V: what copies are taken from."""
        shape = self.page_counts[0], self.target_pool.page_size
        self.text_pages = torch.zeros(shape, dtype=torch.long, device=self.device)

    def text(self, batch: Batch) -> Text:
        """The requests' text so far; `keep_text` was called before any of it."""
        assert self.text_pages is not None
        return Text(self.text_pages, batch.where.pages, batch.where.context_len, batch.anchor)


def _nodes(tree: Tree) -> tuple[int, ...] | None:
    """Nodes of each request, where some have fewer than others; read back from the device."""
    counts: list[int] = tree.valid.sum(1).tolist()
    return None if min(counts) == tree.valid.shape[1] else tuple(counts)


def _common(name: str, configs: Mapping[DrafterRole, DraftConfig]) -> Any:
    """The value of a field that all drafters have in common; None without drafters. Raises CheckpointError."""
    values = {role: getattr(config, name) for role, config in configs.items()}
    (first, expected), *others = values.items() or [(DrafterRole.FIRST, None)]
    for role, found in others:
        if found != expected:
            raise CheckpointError(
                f"The drafters differ in {name}.",
                where=f"drafters.{role.key}: config.json",
                found=found,
                expected=f"{expected}, as drafters.{first.key} has",
            )
    return expected
