"""Tiny hybrids of transformers, of random weights, and what d2sd reads of the folders that they save."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from d2sd.convert.checkpoint.target import load_target
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.native import pack
from tests.tiny import random_tokens

_BODY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
#: MLPs are two thirds as wide as written: 48.
_LFM2 = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 72,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 16,
    "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
}
#: Configs of transformers' models.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5": ("qwen3_5_text", _BODY | {"intermediate_size": 48}),
    "Qwen3.5 MoE": ("qwen3_5_moe_text", _BODY | _MOE),
    "Qwen3-Next": ("qwen3_next", _BODY | _MOE | {"intermediate_size": 48, "mlp_only_layers": [3]}),
    "heads that the compiled library lacks": (
        "qwen3_5_text",
        _BODY | {"intermediate_size": 48, "linear_value_head_dim": 24},
    ),
    "LFM2": ("lfm2", _LFM2),
    "LFM2 MoE": (
        "lfm2_moe",
        _LFM2
        | {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
        },
    ),
    "LFM2, with biases and widths as written": (
        "lfm2",
        _LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    ),
}


class Pair(NamedTuple):
    theirs: Any
    ours: Decoder

    @classmethod
    def of(cls, theirs: Any) -> Pair:
        """transformers' model, and what is read of the folder that it saves."""
        with TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            return cls(theirs, load_target(Path(folder), torch.float32))

    def copy(self, dtype: torch.dtype = torch.float32, *, packed: bool = True) -> Decoder:
        """Another one of ours, as a CPU serves it."""
        decoder = Decoder(self.ours.config)
        decoder.load_state_dict(self.ours.state_dict())
        decoder.eval().requires_grad_(False).to(dtype)
        if packed:
            pack(decoder)
        return decoder

    @torch.no_grad()
    def expected(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.theirs(tokens).logits
        return logits


@cache
def pair(case: str) -> Pair:
    """A model of transformers whose logits spread by about 1 and whose gates reach from 0.01 to 1, and ours."""
    kind, fields = CONFIGS[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("linear_attn.norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise - 1)
            elif kind.startswith("lfm2") and "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() == 1:  # norms of 1 + weight, dt_bias
                parameter.copy_(0.3 * noise)
            else:
                gain = 3.0 if name.startswith("model.embed") else 1.0
                parameter.copy_(gain * noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return Pair.of(model)


@torch.no_grad()
def check_features(ours: Decoder, theirs: Any, layers: tuple[int, ...], tolerance: float) -> None:
    """Features are the outputs of these layers of transformers' model."""
    tokens, seen = random_tokens(ours, 2, 9), []
    hooks = [
        theirs.model.layers[index].register_forward_hook(lambda _module, _inputs, out: seen.append(out))
        for index in layers
    ]
    theirs(tokens)
    for hook in hooks:
        hook.remove()
    found = ours.full_pass(tokens, aux_layer_ids=layers).features
    torch.testing.assert_close(found, torch.cat(seen, -1), rtol=0, atol=tolerance)
