"""The one-model Eagle3 worker, its dynamic-tree subclass, and nothing of Eagle's own drafting, which d2sd replaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Shape letters: B requests, C contexts before G generations, T rows of all, N nodes, P = S + 1 nodes of the longest
# path, V vocabulary.


class SpecWorkerBase(nn.Module):
    guided_decoder: Any
    force_num_accepted_tokens = 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            raise TypeError(f"{cls.__name__} must override _forward_impl, not forward")

    def __init__(self, use_separate_draft_kv_cache: bool = False) -> None:
        super().__init__()
        self.guided_decoder = None
        self.seed: Tensor | None = None
        self.offset: Tensor | None = None

    def forward(self, **inputs: Any) -> Any:
        return self._forward_impl(**inputs)

    def _forward_impl(self, **inputs: Any) -> Any:
        raise NotImplementedError

    def set_guided_decoder(self, guided_decoder: Any) -> bool:
        self.guided_decoder = guided_decoder
        return True

    def set_draft_model(self, draft_model: Any) -> None:
        self._d2t = getattr(getattr(draft_model, "model", None), "d2t", None)

    def _apply_force_accepted_tokens(self, counts: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return counts


class Eagle3OneModelWorker(SpecWorkerBase):
    def __init__(
        self, spec_config: Any, mapping: Any = None, model_config: Any = None, use_separate_draft_kv_cache: bool = False
    ) -> None:
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping, self.model_config = spec_config, mapping, model_config
        self.use_dynamic_tree = getattr(spec_config, "use_dynamic_tree", False)
        self.spec_tree_manager: Any = None

    @property
    def max_draft_len(self) -> int:
        return int(self.spec_config.max_draft_len)

    def _forward_impl(  # type: ignore[override]
        self,
        input_ids: Any,
        position_ids: Any,
        hidden_states: Any,
        logits: Any,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        resource_manager: Any = None,
    ) -> dict[str, Any]:
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        num_gens = batch_size - num_contexts
        hooks: Any = self
        accepted_tokens, num_accepted_tokens = hooks.sample_and_accept_draft_tokens(
            input_ids, logits, attn_metadata, spec_metadata
        )
        attn_metadata.prepare_for_spec_dec("_seq_lens", "_seq_lens_cuda")
        inputs = hooks.prepare_1st_drafter_inputs(
            input_ids=input_ids,
            position_ids=position_ids.squeeze(0),
            hidden_states=hidden_states,
            accepted_tokens=accepted_tokens,
            attn_metadata=attn_metadata,
            spec_metadata=spec_metadata,
            draft_model=draft_model,
        )
        next_draft_tokens = hooks._forward_draft_loop(
            inputs,
            attn_metadata,
            spec_metadata,
            draft_model,
            None,
            num_contexts,
            num_gens,
            batch_size,
            num_accepted_tokens,
            attn_metadata.all_rank_num_tokens,
            resource_manager,
        )
        attn_metadata.restore_from_spec_dec()
        last = accepted_tokens.gather(1, num_accepted_tokens.long()[:, None] - 1)
        return {
            "logits": logits,
            "new_tokens": accepted_tokens,
            "new_tokens_lens": num_accepted_tokens,
            "next_draft_tokens": next_draft_tokens,
            "next_new_tokens": torch.cat([last, next_draft_tokens], dim=1),
        }


def sampled(logits: Tensor, temperatures: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A sample of every row [T, V] at its own temperature [T]."""
    return torch.multinomial(torch.softmax(logits / temperatures[:, None], -1), 1)[:, 0]


def probabilities(logits: Tensor, temperatures: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Target probabilities [T, V] at each row's temperature, in fp32."""
    return torch.softmax(logits.float() / temperatures[:, None], -1)


class Eagle3OneModelDynamicTreeWorker(Eagle3OneModelWorker):
    def __init__(self, spec_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False) -> None:
        super().__init__(spec_config, mapping=mapping, use_separate_draft_kv_cache=use_separate_draft_kv_cache)
        assert self.use_dynamic_tree
        assert spec_config._max_batch_size is not None
        self.tokens_per_gen_step = spec_config.tokens_per_gen_step
        self._max_batch_size = spec_config._max_batch_size
        self._max_path_len = spec_config.max_draft_len + 1
        path = (self._max_batch_size, self._max_path_len)
        self._accepted_tokens_buf = torch.zeros(path, dtype=torch.int32)
        self._num_accepted_tokens_buf = torch.ones(path[0], dtype=torch.int32)
        self._accepted_draft_indices_tensor = torch.full((path[0], path[1] - 1), -1, dtype=torch.int32)
        self._kv_head_dim_bytes = 0

    def _ensure_spec_tree_manager(self, resource_manager: Any) -> None:
        manager = resource_manager.get_resource_manager("spec")
        self.spec_tree_manager = manager.spec_tree_manager
        cache = resource_manager.get_resource_manager("kv")
        self._kv_head_dim_bytes = cache.head_dim * cache.element_size

    def _forward_impl(self, *args: Any, **inputs: Any) -> dict[str, Any]:
        if inputs.get("resource_manager") is not None:
            self._ensure_spec_tree_manager(inputs["resource_manager"])
        output = super()._forward_impl(*args, **inputs)
        count = inputs["attn_metadata"].num_seqs
        output["accepted_draft_tokens_indices"] = self._accepted_draft_indices_tensor[:count]
        return output

    def _relocate_kv_eagerly(self, attn_metadata: Any, batch_size: int) -> None:
        cache = attn_metadata.kv_cache_manager
        assert len(set(cache.num_kv_heads_per_layer)) == 1
        torch.ops.tensorrt_llm.update_kv_cache_draft_token_location_2d(
            self._accepted_draft_indices_tensor[:batch_size],
            self._num_accepted_tokens_buf[:batch_size],
            attn_metadata.kv_lens_cuda[:batch_size],
            True,
            cache.num_layers,
            cache.num_kv_heads_per_layer[0],
            self._kv_head_dim_bytes,
            cache.max_total_draft_tokens,
            cache.max_attention_window_vec[0],
            cache.kv_cache_pool_pointers,
            attn_metadata.kv_cache_block_offsets,
            cache.max_blocks_per_seq,
            cache.tokens_per_block,
            None,
        )

    def sample_and_accept_draft_tokens(
        self, input_ids: Any, logits: Any, attn_metadata: Any, spec_metadata: Any
    ) -> Any:
        batch, contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        generations, nodes = batch - contexts, self.tokens_per_gen_step
        self._accepted_tokens_buf[:batch] = 0
        self._num_accepted_tokens_buf[:batch] = 1
        self._accepted_draft_indices_tensor[:batch] = -1
        greedy = spec_metadata.is_all_greedy_sample
        chosen = logits.argmax(-1) if greedy else sampled(logits, spec_metadata.temperatures[: len(logits)])
        self._accepted_tokens_buf[:contexts, 0] = chosen[:contexts].int()
        if generations:
            storage = self.spec_tree_manager.slot_storage
            slots = storage.all_ids_buf[contexts:batch]
            drafts = spec_metadata.draft_tokens.view(generations, nodes - 1)
            shape = (generations, self._max_path_len)
            by_rejection = spec_metadata.use_rejection_sampling and not greedy
            dtype = torch.int64 if by_rejection else torch.int32
            index, token = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
            count = torch.zeros(generations, dtype=dtype)
            out = index, count, token
            if by_rejection:
                rows = logits[contexts:]
                temperatures = spec_metadata.request_temperatures[contexts:batch].repeat_interleave(nodes)
                torch.ops.trtllm.verify_dynamic_tree_rejection_out_op(
                    drafts.long(),
                    probabilities(rows, temperatures).view(generations, nodes, -1),
                    *storage.next_links_from_slots(slots, generations),
                    storage.has_tree[slots],
                    *out,
                    self._max_path_len,
                    torch.zeros(1, dtype=torch.int64),
                    torch.zeros(1, dtype=torch.int64),
                )
            else:
                predicted = chosen[contexts:].view(generations, nodes).int()
                torch.ops.trtllm.verify_dynamic_tree_greedy_out_packed_op(
                    torch.cat([predicted[:, :1], drafts.int()], dim=1),
                    storage.pack_retrieve_from_slots(slots, generations),
                    predicted,
                    *out,
                    storage.has_tree[slots],
                    self._max_path_len,
                )
            self._finalize_dynamic_tree_verify_outputs(index, count, token, contexts, batch)
            self._relocate_kv_eagerly(attn_metadata, batch)
        return self._accepted_tokens_buf[:batch], self._num_accepted_tokens_buf[:batch]

    def _finalize_dynamic_tree_verify_outputs(
        self, accept_index: Tensor, accept_token_num: Tensor, accept_token: Tensor, contexts: int, batch: int
    ) -> None:
        accepted_tokens = self._accepted_tokens_buf
        accepted_tokens[contexts:batch] = accept_token.int()
        self._num_accepted_tokens_buf[contexts:batch] = accept_token_num.int() + 1
        self._accepted_draft_indices_tensor[contexts:batch] = accept_index[:, 1:].int() - 1

    def prepare_1st_drafter_inputs(
        self,
        input_ids: Any,
        position_ids: Any,
        hidden_states: Any,
        accepted_tokens: Any,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
    ) -> Any:
        raise NotImplementedError(f"Eagle's own drafting: num_ctx_tokens, hidden_size of {spec_metadata}")

    def _forward_draft_loop(
        self,
        inputs: Any,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        draft_kv_cache_manager: Any,
        num_contexts: Any,
        num_gens: Any,
        batch_size: Any,
        num_accepted_tokens: Any,
        original_all_rank_num_tokens: Any,
        resource_manager: Any,
    ) -> Any:
        raise NotImplementedError("Eagle's own drafting: gather_ids, all_ids_buf")
