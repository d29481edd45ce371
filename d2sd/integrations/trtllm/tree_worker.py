"""TensorRT-LLM's Eagle3 worker for dynamic trees with d2sd's drafting in place of Eagle's. Not yet run there.

Its step over contexts and generations, of which two hooks are overridden:

    target over N rows a request, acceptance, K/V moved to the accepted path      TensorRT-LLM's
    prepare_1st_drafter_inputs     features of what was accepted -> pages         ours
    _forward_draft_loop            first draft, second draft, tree -> slots       ours
    tokens and drafts to the sampler                                              TensorRT-LLM's

Trees are drafted for contexts, too: the first generation step verifies one. If drafting raises, the slots of the batch
have no tree from then on and every step is plain decoding: their rows are verified, and the root alone is accepted.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.integrations.trtllm.contract import DRAFT, PREPARE
from d2sd.integrations.trtllm.tree_drafters import TreeDrafters
from d2sd.integrations.trtllm.tree_slots import SlotStorage, store_tree

# Shape letters: B requests of a batch, C contexts, then G generations; T rows of all; N nodes of a tree; S drafts of a
# path, P = S + 1 nodes of it.


class Committed(NamedTuple):
    """Rows of the target that a step commits, of any requests; one tensor [K] each."""

    rows: Tensor  # in the target's pass
    slots: Tensor
    positions: Tensor
    keep: Tensor  # bool: rows past the accepted path are not


def committed_rows(worker: Any, position_ids: Tensor, attn_metadata: Any) -> Committed:
    """All rows of contexts, and the accepted path of each generation, P rows of them, the root first."""
    contexts, batch = attn_metadata.num_contexts, attn_metadata.num_seqs
    count, nodes, path = attn_metadata.num_ctx_tokens, worker.tokens_per_gen_step, worker._max_path_len
    slots, device = worker.spec_tree_manager.slot_storage.all_ids_buf[:batch], position_ids.device
    lengths = attn_metadata._seq_lens_cuda[:contexts].long()
    steps = torch.arange(path, device=device)
    starts = count + nodes * torch.arange(batch - contexts, device=device)
    index = worker._accepted_draft_indices_tensor[contexts:batch].long() + 1  # -1 past the path
    index = torch.cat([torch.zeros_like(index[:, :1]), index], dim=1)
    accepted = worker._num_accepted_tokens_buf[contexts:batch, None]
    return Committed(
        torch.cat([torch.arange(count, device=device), (starts[:, None] + index).flatten()]),
        torch.cat(
            [slots[:contexts].repeat_interleave(lengths, output_size=count), slots[contexts:].repeat_interleave(path)]
        ),
        torch.cat([position_ids[:count].long(), (position_ids[starts].long()[:, None] + steps).flatten()]),
        torch.cat([torch.ones(count, dtype=torch.bool, device=device), (steps < accepted).flatten()]),
    )


def context_lengths(
    position_ids: Tensor, num_ctx_tokens: int, nodes: int, last_rows: Tensor, num_accepted: Tensor
) -> Tensor:
    """Tokens [B] that are committed after the step: what comes before the anchor.

    `last_rows [C]` are the last rows of contexts. A generation's root is where its context ended, and `num_accepted
    [B]` nodes of its path, the root among them, are committed. Of position_ids [T], those of other nodes are not read.
    """
    contexts = len(last_rows)
    starts = num_ctx_tokens + nodes * torch.arange(len(num_accepted) - contexts, device=position_ids.device)
    ends = position_ids[last_rows].long() + 1
    return torch.cat([ends, position_ids[starts].long() + num_accepted[contexts:].long()])


def check_step(worker: Any, attn_metadata: Any, spec_metadata: Any, drafters: TreeDrafters) -> None:
    """Compare what the first step is given with the contract. Raises D2SDError naming what differs."""
    try:
        wrong = [
            *_tensor_faults(worker),
            *_fact_faults(worker, attn_metadata.kv_cache_manager, spec_metadata, drafters),
        ]
    except AttributeError as error:
        wrong = [str(error)]
    if wrong:
        raise D2SDError(
            "TensorRT-LLM's step differs from what d2sd's tree was written for.",
            where="the first step",
            found="; ".join(wrong),
            fix="serve trtllm/llm_args.dflash.yaml; d2sd trtllm check --tree prints the table",
        )


def _tensor_faults(worker: Any) -> list[str]:
    storage = worker.spec_tree_manager.slot_storage
    nodes, path, batch = worker.tokens_per_gen_step, worker._max_path_len, worker._max_batch_size
    slots, words = len(storage.has_tree), -(-nodes // 32)
    contract = {
        "packed_mask": (storage, (slots, nodes, words), torch.int32),
        "position_offsets": (storage, (slots, nodes), torch.int32),
        "retrieve_index": (storage, (slots, nodes), torch.int32),
        "retrieve_next_token": (storage, (slots, nodes), torch.int32),
        "retrieve_next_sibling": (storage, (slots, nodes), torch.int32),
        "has_tree": (storage, (slots,), torch.bool),
        "all_ids_buf": (storage, (slots - 1,), torch.int64),
        "_accepted_draft_indices_tensor": (worker, (batch, path - 1), torch.int32),
        "_accepted_tokens_buf": (worker, (batch, path), torch.int32),
        "_num_accepted_tokens_buf": (worker, (batch,), torch.int32),
    }
    wrong = []
    for name, (owner, shape, dtype) in contract.items():
        tensor = getattr(owner, name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            wrong.append(f"{name} is {tensor.dtype} of {tuple(tensor.shape)}, not {dtype} of {shape}")
    return wrong


def _fact_faults(worker: Any, manager: Any, spec_metadata: Any, drafters: TreeDrafters) -> list[str]:
    facts = {
        "max_draft_len + 1": (worker._max_path_len, drafters.runner.block_size),
        "layers_to_capture": (list(spec_metadata.layers_to_capture), list(drafters.runner.aux_layer_ids)),
        "kv_cache_config.enable_block_reuse": (bool(manager.enable_block_reuse), False),
        "having different numbers of K/V heads": (len(set(manager.num_kv_heads_per_layer)) > 1, False),
        "having an attention window": (min(manager.max_attention_window_vec) < manager.max_seq_len, False),
    }
    return [f"{name} is {found}, not {expected}" for name, (found, expected) in facts.items() if found != expected]


def _by_name(contract: str, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The arguments of a hook as attributes, by the names of its parameters in the contract."""
    return SimpleNamespace(**dict(zip(contract.split(", ")[1:], given, strict=False)), **named)


def tree_worker(base: type[Any]) -> type[Any]:
    """Subclass the installed `Eagle3OneModelDynamicTreeWorker`, which cannot be imported here."""

    class D2SDTreeWorker(base):  # type: ignore[misc]
        """With any other draft model it behaves like its base class."""

        #: Stays set: a captured CUDA graph cannot switch drafting on again, and pages may lack rows.
        drafting_failed = False

        def prepare_1st_drafter_inputs(self, *given: Any, **named: Any) -> dict[str, Any]:
            """Write what the step committed to the drafters' pages."""
            step = _by_name(PREPARE, given, named)
            draft_model, attn_metadata, spec_metadata = step.draft_model, step.attn_metadata, step.spec_metadata
            if not isinstance(draft_model, TreeDrafters):
                inputs: dict[str, Any] = super().prepare_1st_drafter_inputs(*given, **named)
                return inputs
            if self.spec_tree_manager is not None and not draft_model.allocated:
                check_step(self, attn_metadata, spec_metadata, draft_model)
                slots, manager = len(self.spec_tree_manager.slot_storage.has_tree), attn_metadata.kv_cache_manager
                # while K/V is estimated, max_seq_len may be what the little K/V holds; the window is not cut
                draft_model.allocate(slots, max(manager.max_seq_len, *manager.max_attention_window_vec))
            if self._drafts():
                try:
                    self._commit(step.input_ids, step.position_ids, attn_metadata, spec_metadata, draft_model)
                except Exception:  # any error: requests are in flight
                    self._give_up()
            return {"position_ids": step.position_ids}

        def _forward_draft_loop(self, *given: Any, **named: Any) -> Tensor:
            """Draft a tree for every request and store it in its slot; returns its tokens [B, N - 1] int32."""
            step = _by_name(DRAFT, given, named)
            if not isinstance(step.draft_model, TreeDrafters):
                tokens: Tensor = super()._forward_draft_loop(*given, **named)
                return tokens
            positions, accepted_counts = step.inputs["position_ids"], step.num_accepted_tokens
            nodes = self.tokens_per_gen_step
            if self._drafts():
                storage = self.spec_tree_manager.slot_storage
                slots = storage.all_ids_buf[: step.batch_size]
                last_rows = step.spec_metadata.gather_ids[: step.num_contexts]
                try:
                    count = step.attn_metadata.num_ctx_tokens
                    length = context_lengths(positions, count, nodes, last_rows, accepted_counts)
                    accepted = self._accepted_tokens_buf[: step.batch_size].long()
                    anchor = accepted.gather(1, accepted_counts.long()[:, None] - 1)[:, 0]
                    return store_tree(storage, slots, step.draft_model.draft(anchor, slots, length))
                except Exception:  # any error: requests are in flight
                    self._give_up()
            if self.spec_tree_manager is not None:
                undrafted(self.spec_tree_manager.slot_storage, step.batch_size)
            return torch.zeros(step.batch_size, nodes - 1, dtype=torch.int32, device=positions.device)

        def set_guided_decoder(self, guided_decoder: Any) -> bool:
            """Decline: TensorRT-LLM applies a grammar to a step's rows as if they were a chain."""
            return False

        def _drafts(self) -> bool:
            return self.spec_tree_manager is not None and not self.drafting_failed

        def _commit(
            self, input_ids: Tensor, position_ids: Tensor, attn_metadata: Any, spec_metadata: Any, draft_model: Any
        ) -> None:
            rows, slots, positions, keep = committed_rows(self, position_ids, attn_metadata)
            width = len(spec_metadata.layers_to_capture) * spec_metadata.hidden_size
            features = spec_metadata.hidden_states[rows, :width]
            draft_model.write_context(features, input_ids[rows].long(), slots, positions, keep)

        def _give_up(self) -> None:
            """Log the error in flight, once."""
            self.drafting_failed = True
            text = f"d2sd: drafting failed; every step decodes plainly from now on\n{traceback.format_exc()}"
            print(text, file=sys.stderr, flush=True)

    return D2SDTreeWorker


def undrafted(storage: SlotStorage, batch_size: int) -> None:
    """Mark the slots of the batch as without a tree: acceptance takes their roots alone."""
    storage.has_tree.index_fill_(0, storage.all_ids_buf[:batch_size], False)
