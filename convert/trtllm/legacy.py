"""A target in TensorRT-LLM's old checkpoint layout: `config.json` and `rank0.safetensors`, one GPU. Not yet run.

For fleets frozen on its TensorRT engines (`STAMP`). Later versions load the Hugging Face folder itself, and no version
of the old flow has a mode for our drafters. The names are those ModelOpt 0.47 wrote for a Llama; Qwen's biases and q/k
norms follow TensorRT-LLM's documentation.

    q, k, v   ->  attention.qkv    stacked in this order, one scale: the largest
    gate_proj ->  mlp.fc           the activated branch; one scale with up_proj
    up_proj   ->  mlp.gate
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from d2sd.convert.files import remove, write_json
from d2sd.convert.hf_config import rope_fields
from d2sd.convert.trtllm.unified import Source, open_source
from d2sd.convert.weights import write_tensors
from d2sd.errors import CheckpointError

STAMP = "TensorRT-LLM <= 1.2.1 / 1.3.0rc20"
_FP8 = torch.float8_e4m3fn
#: Linears of a layer that share a scale, and the name they get.
_GROUPS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
_SHARED_SCALE = {"mlp.fc": ("mlp.gate_proj", "mlp.up_proj"), "mlp.gate": ("mlp.gate_proj", "mlp.up_proj")}
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_layernorm.weight",
    "self_attn.q_norm.weight": "attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "attention.k_layernorm.weight",
}


def write_legacy(source: Path, out: Path) -> None:
    """Write the checkpoint in `source` to the new folder `out`, whole or not at all. Raises `CheckpointError`."""
    if out.exists():
        raise CheckpointError("The output exists already.", where=out, fix="name a new folder")
    opened = open_source(source)
    tensors = dict(_tensors(opened))  # all at once: the layout is one file a rank
    partial = out.with_name(out.name + ".partial")
    remove(partial)
    partial.mkdir(parents=True)
    write_tensors(partial / "rank0.safetensors", tensors)
    write_json(partial / "config.json", _config(opened, tensors["transformer.vocab_embedding.weight"].dtype))
    partial.rename(out)


def _tensors(source: Source) -> Iterator[tuple[str, Tensor]]:
    embedding = source.get("model.embed_tokens.weight")
    yield "transformer.vocab_embedding.weight", embedding
    # A tied head is written again: the loader looks for every name.
    yield "lm_head.weight", embedding.clone() if source.config.tie_word_embeddings else source.get("lm_head.weight")
    yield "transformer.ln_f.weight", source.get("model.norm.weight")
    for index in range(source.config.body.num_layers):
        old, new = f"model.layers.{index}", f"transformer.layers.{index}"
        for name, renamed in _NORMS.items():
            if f"{old}.{name}" in source.tensors:
                yield f"{new}.{renamed}", source.get(f"{old}.{name}")
        for group, parts in _GROUPS.items():
            for name, tensor in _linear(source, old, group, parts):
                yield f"{new}.{group}.{name}", tensor
        if source.fp8_kv:
            scales = [source.scale(f"{old}.self_attn.{x}_proj.{x}_scale") for x in "kv"]
            yield f"{new}.attention.kv_cache_scaling_factor", torch.cat(scales).amax(0, keepdim=True)


def _linear(source: Source, layer: str, group: str, parts: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Weight, bias and scales of one linear, fused where the old layout fuses."""
    weights = [source.get(f"{layer}.{part}.weight") for part in parts]
    if source.fp8:
        sharing = _SHARED_SCALE.get(group, parts)
        common = torch.cat([source.scale(f"{layer}.{part}.weight_scale") for part in sharing]).amax(0, keepdim=True)
        own = [source.scale(f"{layer}.{part}.weight_scale") for part in parts]
        weights = [_rescaled(weight, scale / common) for weight, scale in zip(weights, own, strict=True)]
        inputs = torch.cat([source.scale(f"{layer}.{part}.input_scale") for part in sharing])
        yield "weights_scaling_factor", common
        yield "activation_scaling_factor", inputs.amax(0, keepdim=True)
    yield "weight", torch.cat(weights)
    biases = [f"{layer}.{part}.bias" for part in parts if f"{layer}.{part}.bias" in source.tensors]
    if biases:
        yield "bias", torch.cat([source.get(name) for name in biases])


def _rescaled(weight: Tensor, factor: Tensor) -> Tensor:
    """FP8 weights of a scale that grows by 1 / factor; factor is at most 1, so nothing overflows."""
    return weight if factor.item() == 1 else (weight.float() * factor).to(_FP8)


def _config(source: Source, dtype: torch.dtype) -> dict[str, object]:
    config, body = source.config, source.config.body
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    family = {} if config.family == "llama" else {"qwen_type": config.family}
    rope = rope_fields(body.rope)
    return {
        "d2sd_stamp": f"for {STAMP} only, one GPU; not yet run",
        "producer": {"name": "d2sd", "version": version("d2sd")},
        "architecture": architecture[config.family],
        "dtype": str(dtype).removeprefix("torch."),
        "logits_dtype": "float32",
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_hidden_layers": body.num_layers,
        "num_attention_heads": body.num_heads,
        "num_key_value_heads": body.num_kv_heads,
        "head_size": body.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "norm_epsilon": body.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": body.max_positions,
        "rotary_base": rope["rope_theta"],
        "rotary_scaling": rope["rope_scaling"],
        "attn_bias": body.qkv_bias,
        "mlp_bias": False,
        "qk_layernorm": body.qk_norm,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {
            "quant_algo": "FP8" if source.fp8 else None,
            "kv_cache_quant_algo": "FP8" if source.fp8_kv else None,
            "exclude_modules": ["lm_head"] if source.fp8 else None,
        },
        **family,
    }
