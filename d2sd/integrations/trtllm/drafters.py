"""Two drafters as one draft model for TensorRT-LLM's DFlash worker. Not yet run under TensorRT-LLM.

The worker has one context cache, [slots, layers, positions, heads, head size], with a slot per request, and fills it
with K/V that the draft model computes from the target's features. Here it contains the layers of both drafters,
stacked, so TensorRT-LLM handles prefill, chunks, slots and rollback for both.

    cache layers      0 .. L1-1       L1 .. L1+L2-1
                      first drafter   second drafter
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

# Shape letters: N tokens, B requests, W block width, E hidden, n auxiliary layers, L1, L2 layers, Hkv heads,
# D head size.

#: Attributes of a draft model that TensorRT-LLM reads, forwarded to the first drafter. No others are, so that a hook
#: found by name does not run twice on the same module.
_OF_FIRST = {
    "fc", "hidden_norm", "model", "draft_model_full", "lm_head", "config", "model_config", "mask_token_id",
    "target_layer_ids", "block_size", "dflash_attention_backend", "_num_heads", "_num_kv_heads", "_head_dim",
}  # fmt: skip


class DualDrafter(nn.Module):
    """`first` and `second` are TensorRT-LLM's own drafter modules; `second_folder` holds the latter's weights."""

    first: Any
    second: Any

    def __init__(self, first: nn.Module, second: nn.Module, second_folder: Path) -> None:
        super().__init__()
        self.first, self.second = first, second
        self._second_folder = second_folder

    def __getattr__(self, name: str) -> Any:
        """Forward `_OF_FIRST` to the first drafter, where they change while weights are loaded."""
        return getattr(self.first, name) if name in _OF_FIRST else super().__getattr__(name)

    @property
    def _num_attn_layers(self) -> int:
        """Layers of the context cache; available once the drafters' buffers are built."""
        return int(self.first._num_attn_layers + self.second._num_attn_layers)

    def _build_fused_kv_buffers(self) -> None:
        for drafter in (self.first, self.second):
            drafter._build_fused_kv_buffers()
        shapes = {(d._num_heads, d._num_kv_heads, d._head_dim) for d in (self.first, self.second)}
        assert len(shapes) == 1, f"the drafters' heads differ although register.py compared the configs: {shapes}"

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        """Features [N, n·E] -> [N, 2·E], each drafter's own projection."""
        return torch.cat([d.project_target_hidden(hidden_states) for d in (self.first, self.second)], dim=-1)

    def precompute_context_kv(self, projected_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 2·E] -> K and V of all layers, [N, L1 + L2, Hkv, D] each."""
        halves = zip((self.first, self.second), projected_hidden.chunk(2, dim=-1), strict=True)
        pairs = [d.precompute_context_kv(half.contiguous(), positions) for d, half in halves]
        return torch.cat([k for k, _ in pairs], dim=1), torch.cat([v for _, v in pairs], dim=1)

    def dflash_forward(
        self,
        noise_embedding: Tensor,
        query_positions: Tensor,
        num_ctx_per_req: Tensor,
        ctx_k_cache: Tensor,
        ctx_v_cache: Tensor,
        ctx_cache_batch_idx: Tensor,
        ctx_kv_cache: None = None,
        ctx_page_table: None = None,
    ) -> Tensor:
        """The first pass, [B, W, E] -> [B·W, E]. The cache is dense: register.py rejects other backends."""
        layers = slice(0, self.first._num_attn_layers)
        out: Tensor = self.first.dflash_forward(
            noise_embedding=noise_embedding,
            query_positions=query_positions,
            num_ctx_per_req=num_ctx_per_req,
            ctx_k_cache=ctx_k_cache[:, layers],
            ctx_v_cache=ctx_v_cache[:, layers],
            ctx_cache_batch_idx=ctx_cache_batch_idx,
        )
        return out

    def second_pass(self, tokens: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Blocks [B, W] over the context that the first pass was given in `inputs` -> [B·W, E]."""
        layers = slice(self.first._num_attn_layers, None)
        embedded = self.draft_model_full.model.embed_tokens(tokens.flatten()).unflatten(0, tokens.shape)
        out: Tensor = self.second.dflash_forward(
            noise_embedding=embedded,
            query_positions=inputs["query_positions"],
            num_ctx_per_req=inputs["num_ctx_per_req"],
            ctx_k_cache=inputs["ctx_k_cache"][:, layers],
            ctx_v_cache=inputs["ctx_v_cache"][:, layers],
            ctx_cache_batch_idx=inputs["ctx_cache_batch_idx"],
        )
        return out

    def load_weights(self, weights: dict[str, Tensor], weight_mapper: Any = None, **kwargs: Any) -> None:
        """`weights` are the first drafter's, from the server's arguments; the second's are loaded from its folder."""
        self.first.load_weights(weights, weight_mapper=weight_mapper, **kwargs)
        second = load_file(self._second_folder / "model.safetensors")
        self.second.load_weights(second, weight_mapper=weight_mapper, **kwargs)

    def load_weights_from_target_model(self, target_model: nn.Module) -> None:
        """Share the target's embedding and head."""
        for drafter in (self.first, self.second):
            drafter.load_weights_from_target_model(target_model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """DFlash drafts with `dflash_forward`; this is the interface's general forward."""
        return self.first(*args, **kwargs)
