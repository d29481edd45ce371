"""A stand-in for the parts of TensorRT-LLM that we use, on the CPU: our reading of its sources, written anew and small.

It proves that our pieces fit this reading, not that TensorRT-LLM is like it. One process; generation requests only,
behind a prefill; acceptance is exact match. Shapes as there: features and logits are flat over requests and rows.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.config import BodyConfig, RopeConfig
from d2sd.modeling.layers import Layer, RMSNorm, Rotary

PACKAGE = "tensorrt_llm._torch"


class SpeculativeDecodingMode(enum.IntEnum):
    PARD = enum.auto()
    DFLASH = enum.auto()


BUILDERS: dict[Any, Callable[..., Any]] = {}


def register_draft_model(mode: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorator(builder: Callable[..., Any]) -> Callable[..., Any]:
        BUILDERS[mode] = builder
        return builder

    return decorator


def get_registered_draft_model_builder(mode: Any) -> Any:
    return BUILDERS.get(mode, _build_dflash_draft)


def get_spec_worker(
    spec_config: Any, model_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False
) -> Any:
    utils: Any = sys.modules[f"{PACKAGE}.speculative.utils"]
    return utils.DFlashWorker(spec_config, mapping, use_separate_draft_kv_cache)


def _build_dflash_draft(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
    return DFlashForCausalLM(draft_config, dflash_attention_backend=model_config.spec_config.attention_backend)


@dataclasses.dataclass
class ModelConfig:
    pretrained_config: Any
    spec_config: Any = None


class DFlashForCausalLM(nn.Module):
    fc: nn.Linear
    hidden_norm: RMSNorm
    model: Any

    def __init__(self, draft_config: ModelConfig, *, dflash_attention_backend: str = "VANILLA") -> None:
        super().__init__()
        self.config = config = draft_config.pretrained_config
        body = BodyConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope=RopeConfig(config.rope_theta),
            max_positions=config.max_position_embeddings,
            qk_norm=True,
            qkv_bias=False,
            o_bias=False,
        )
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(body) for _ in range(body.num_layers))
        self.model.norm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.draft_model_full = SimpleNamespace(model=SimpleNamespace(embed_tokens=None))
        self.rotary, self.lm_head, self.logits_processor = Rotary(body.rope, body.head_dim), None, None
        self.mask_token_id, self.block_size = config.dflash_config["mask_token_id"], config.block_size
        self.dflash_attention_backend = dflash_attention_backend
        self._num_attn_layers = self._num_heads = self._num_kv_heads = self._head_dim = 0

    def load_weights(self, weights: dict[str, Tensor], weight_mapper: Any = None, **kwargs: Any) -> None:
        rest = dict(weights)
        fc, norm = rest.pop("fc.weight"), rest.pop("hidden_norm.weight")
        self.fc = nn.Linear(fc.shape[1], fc.shape[0], bias=False)
        self.hidden_norm = RMSNorm(len(norm), self.config.rms_norm_eps)
        self.fc.load_state_dict({"weight": fc})
        self.hidden_norm.load_state_dict({"weight": norm})
        self.model.load_state_dict(rest)
        self.requires_grad_(False)

    def load_weights_from_target_model(self, target_model: Any) -> None:
        self.draft_model_full.model.embed_tokens = target_model.model.embed_tokens
        self.lm_head = target_model.lm_head

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(hidden_states))  # type: ignore[no-any-return]

    def _build_fused_kv_buffers(self) -> None:
        self._num_attn_layers, attention = len(self.model.layers), self.model.layers[0].self_attn
        self._head_dim = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim

    def precompute_context_kv(self, projected_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos_sin = self.rotary(positions, projected_hidden.dtype)
        pairs = [layer.self_attn.keys_values(projected_hidden, cos_sin) for layer in self.model.layers]
        assert len(pairs) == self._num_attn_layers
        return torch.stack([k for k, _ in pairs], 1), torch.stack([v for _, v in pairs], 1)

    def dflash_forward(
        self,
        noise_embedding: Tensor,
        query_positions: Tensor,
        num_ctx_per_req: Tensor,
        ctx_k_cache: Tensor,
        ctx_v_cache: Tensor,
        ctx_cache_batch_idx: Tensor,
        ctx_kv_cache: Any = None,
        ctx_page_table: Any = None,
    ) -> Tensor:
        assert ctx_k_cache.shape[1] == self._num_attn_layers, "a cache of other layers"

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)
            for row, (slot, length) in enumerate(zip(ctx_cache_batch_idx, num_ctx_per_req, strict=True)):
                end = int(length) + q.shape[1]
                ctx_k_cache[slot, index, length:end], ctx_v_cache[slot, index, length:end] = k[row], v[row]
                keys, values = (c[slot, index, :end].transpose(0, 1)[None] for c in (ctx_k_cache, ctx_v_cache))
                out[row] = F.scaled_dot_product_attention(q[row].transpose(0, 1)[None], keys, values, enable_gqa=True)[
                    0
                ].transpose(0, 1)
            return out

        x, cos_sin = noise_embedding, self.rotary(query_positions, noise_embedding.dtype)
        for index, layer in enumerate(self.model.layers):
            x, _, _ = layer(x, cos_sin, index, attend)
        return self.model.norm(x).flatten(0, 1)  # type: ignore[no-any-return]


class DFlashWorker(nn.Module):
    def __init__(self, spec_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False) -> None:
        super().__init__()
        self.spec_config, self._ctx_len = spec_config, torch.zeros(0, dtype=torch.long)
        self._ctx_k_buf = self._ctx_v_buf = torch.zeros(0)

    def _lazy_init_ctx_buffers(self, draft_model: Any, spec_metadata: Any) -> None:
        if len(self._ctx_len):
            return
        draft_model._build_fused_kv_buffers()
        slots, capacity = spec_metadata.max_num_requests + 1, spec_metadata.max_seq_len + draft_model.block_size
        shape = slots, draft_model._num_attn_layers, capacity, draft_model._num_kv_heads, draft_model._head_dim
        self._ctx_len = torch.zeros(slots, dtype=torch.long)
        self._ctx_k_buf, self._ctx_v_buf = torch.full(shape, torch.nan), torch.full(shape, torch.nan)

    def store_prefill_context(self, draft_model: Any, spec_metadata: Any, slot: int, features: Tensor) -> None:
        """One prompt's features [N, n·E]; there the requests of a batch one after the other."""
        self._lazy_init_ctx_buffers(draft_model, spec_metadata)
        projected = draft_model.project_target_hidden(features)
        k, v = draft_model.precompute_context_kv(projected, torch.arange(len(features)))
        self._ctx_k_buf[slot, :, : len(features)], self._ctx_v_buf[slot, :, : len(features)] = (
            k.transpose(0, 1),
            v.transpose(0, 1),
        )
        self._ctx_len[slot] = len(features)

    def _forward_impl(
        self,
        input_ids: Any,
        position_ids: Any,
        hidden_states: Any,
        logits: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        resource_manager: Any = None,
    ) -> dict[str, Tensor]:
        self._lazy_init_ctx_buffers(draft_model, spec_metadata)
        drafts, width = self.spec_config.max_draft_len, self.spec_config.max_draft_len + 1
        chosen, proposed = logits.argmax(-1).view(-1, width), input_ids.view(-1, width)[:, 1:]
        lengths = 1 + (chosen[:, :-1] == proposed).int().cumprod(-1).sum(-1)
        inputs = self.prepare_1st_drafter_inputs(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            accepted_tokens=chosen,
            num_accepted_tokens=lengths,
            attn_metadata=attn_metadata,
            spec_metadata=spec_metadata,
            draft_model=draft_model,
            total_target_tokens=len(input_ids),
        )
        names = ("noise_embedding", "query_positions", "num_ctx_per_req", "ctx_k_cache", "ctx_v_cache")
        rows = draft_model.dflash_forward(
            **{name: inputs[name] for name in names},
            ctx_cache_batch_idx=inputs["ctx_cache_batch_idx"],
            ctx_kv_cache=None,
            ctx_page_table=None,
        )
        rows = rows[self._draft_slot_ids(draft_model, len(lengths), width, drafts)]
        found = draft_model.logits_processor(rows, draft_model.lm_head, attn_metadata, True)
        found = self._refine_block_logits(draft_model, found.view(len(lengths), drafts, -1), inputs, spec_metadata)
        return {"new_tokens": chosen, "new_tokens_lens": lengths, "next_draft_tokens": found.argmax(-1)}

    def prepare_1st_drafter_inputs(
        self,
        input_ids: Any,
        position_ids: Any,
        hidden_states: Any,
        accepted_tokens: Tensor,
        num_accepted_tokens: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        total_target_tokens: int = 0,
    ) -> dict[str, Any]:
        slots, width = spec_metadata.slots, self.spec_config.max_draft_len + 1
        positions = self._ctx_len[slots][:, None] + torch.arange(width)
        projected = draft_model.project_target_hidden(spec_metadata.captured)
        k, v = draft_model.precompute_context_kv(projected, positions.flatten())
        kept = (torch.arange(width) < num_accepted_tokens[:, None]).flatten()
        where = slots[:, None].expand_as(positions).flatten()[kept], slice(None), positions.flatten()[kept]
        self._ctx_k_buf[where], self._ctx_v_buf[where] = k[kept], v[kept]
        self._ctx_len[slots] += num_accepted_tokens
        anchor = accepted_tokens.gather(1, num_accepted_tokens[:, None] - 1)[:, 0]
        tokens = torch.cat([anchor[:, None], torch.full((len(slots), width - 1), draft_model.mask_token_id)], 1)
        return {
            "noise_embedding": draft_model.draft_model_full.model.embed_tokens(tokens),
            "query_positions": self._ctx_len[slots][:, None] + torch.arange(width),
            "num_ctx_per_req": self._ctx_len[slots],
            "ctx_k_cache": self._ctx_k_buf,
            "ctx_v_cache": self._ctx_v_buf,
            "ctx_cache_batch_idx": slots,
            "first_prev_tokens": anchor,
        }

    def _draft_slot_ids(self, draft_model: Any, num_gens: int, block_size: int, num_draft_tokens: int) -> Tensor:
        return (torch.arange(num_gens)[:, None] * block_size + 1 + torch.arange(num_draft_tokens)).flatten()

    def _refine_block_logits(self, draft_model: Any, gen_logits: Tensor, inputs: Any, spec_metadata: Any) -> Tensor:
        return gen_logits


_CONTENT: dict[str, tuple[Any, ...]] = {
    "tensorrt_llm": (),
    PACKAGE: (),
    f"{PACKAGE}.models": (),
    f"{PACKAGE}.models.modeling_dflash": (DFlashForCausalLM, _build_dflash_draft),
    f"{PACKAGE}.models.modeling_utils": (register_draft_model, get_registered_draft_model_builder),
    f"{PACKAGE}.speculative": (),
    f"{PACKAGE}.speculative.dflash": (DFlashWorker,),
    f"{PACKAGE}.speculative.interface": (SpeculativeDecodingMode,),
    f"{PACKAGE}.speculative.utils": (get_spec_worker, DFlashWorker),
}


def install(monkeypatch: pytest.MonkeyPatch, version: str = "1.3.0rc25") -> dict[str, types.ModuleType]:
    """Put the fake where imports find it; return its modules by their last names, to be changed by a test."""
    BUILDERS.clear()
    found = {}
    for name, content in _CONTENT.items():
        module = types.ModuleType(name)
        for thing in content:
            setattr(module, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, name, module)
        found[name.rsplit(".", 1)[-1]] = module
    vars(found["tensorrt_llm"])["__version__"] = version
    return found
