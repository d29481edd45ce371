"""Tiny drafters in every format, as their writers spell them, and the logits of a draft.

Shape letters: T context tokens, G block size, n auxiliary layers, E hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from d2sd.convert.formats.speculators import to_tensors
from d2sd.modeling.config import Role, RopeConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from tests.tiny import tiny_decoder, tiny_drafter

IDS = (0, 3, 17, 40, 62)  # a draft vocabulary of the tiny 0 .. 63, whose mask is 63
ROPE = RopeConfig(500000.0)  # not Transformers' default: a reader that forgets it shows


def tiny_pair(*, layers: int = 6, role: Role = "first", ids: tuple[int, ...] = (0, 2, 4)) -> tuple[Decoder, Drafter]:
    """A target with a head of its own, and a drafter of three of its layers."""
    decoder = tiny_decoder(layers=layers, rope=ROPE, tie=False)
    return decoder, tiny_drafter(decoder.config, role=role, target_layer_ids=ids)


def reduced(drafter: Drafter) -> Drafter:
    """The same drafter with a draft vocabulary."""
    twin = Drafter(replace(drafter.config, draft_vocabulary=IDS))
    twin.load_state_dict(drafter.state_dict())
    return twin.eval().requires_grad_(False)


def body(drafter: Drafter) -> dict[str, Any]:
    """Return the keys that all layouts have in common."""
    config = drafter.config.body
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_positions,
        "model_type": "qwen3",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "vocab_size": drafter.config.vocab_size,
    }


def public_fields(drafter: Drafter) -> dict[str, Any]:
    """The config.json of a drafter that z-lab published: remote code, token ids, defaults left to readers."""
    config = drafter.config
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": config.block_size,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
        "dtype": "float32",
        "eos_token_id": 2,
        "max_window_layers": 5,
        "num_target_layers": config.num_target_layers,
        "rope_scaling": None,
        "rope_theta": int(config.body.rope.theta),
        "sliding_window": None,
        "transformers_version": "4.57.3",
        "use_cache": True,
        "use_sliding_window": False,
    } | body(drafter)


def modelopt_fields(drafter: Drafter) -> dict[str, Any]:
    """The config.json of nvidia-modelopt 0.47."""
    fields = public_fields(drafter)
    for key in ("auto_map", "bos_token_id", "eos_token_id", "max_window_layers", "transformers_version", "use_cache"):
        del fields[key]
    del fields["sliding_window"], fields["use_sliding_window"]
    fields["dflash_config"]["causal"] = False
    fields["torch_dtype"] = fields.pop("dtype")
    return fields


def speculators_fields(drafter: Drafter, **changes: Any) -> dict[str, Any]:
    """The config.json of speculators 0.9, which knows neither the target's depth nor roles."""
    config = drafter.config
    vocabulary = config.draft_vocabulary
    fields = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": len(vocabulary) if vocabulary else config.vocab_size,
        "dtype": "float32",
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/tiny"},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": body(drafter)
        | {
            "dtype": "float32",
            "max_window_layers": 2,
            "rope_parameters": {"rope_theta": config.body.rope.theta, "rope_type": "default"},
            "sliding_window": None,
            "use_cache": True,
            "use_sliding_window": False,
        },
        "transformers_version": "5.14.1",
    }
    return fields | changes


def extra(decoder: Decoder, drafter: Drafter) -> dict[str, Tensor]:
    """The tensors that a self-contained speculators checkpoint adds."""
    ids = drafter.config.draft_vocabulary
    if ids is None:
        return {"embed_tokens.weight": decoder.embed_tokens.weight, "lm_head.weight": decoder.head}
    rows = decoder.head[torch.tensor(ids)]
    copies = {"embed_tokens.weight": decoder.embed_tokens.weight, "lm_head.weight": rows}
    return copies | to_tensors(ids, drafter.config.vocab_size)


def write_foreign(
    folder: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> Path:
    """Write a directory as its own project would: its keys in its order, indented by two."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata)
    return folder


def draft_hidden(decoder: Decoder, drafter: Drafter, context: Tensor, anchor: int) -> Tensor:
    """context [T] -> hidden states [G, E] of the block behind it, by plain attention over [context ; block]."""
    config = drafter.config
    features = decoder.full_pass(context[None], aux_layer_ids=config.target_layer_ids).features
    keys, values = drafter.context_keys_values(features, torch.arange(len(context))[None])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        k, v = torch.cat([keys[layer], k], dim=1), torch.cat([values[layer], v], dim=1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out.transpose(1, 2)

    block = torch.tensor([[anchor] + [config.mask_token_id] * (config.block_size - 1)])
    positions = len(context) + torch.arange(config.block_size)[None]
    hidden: Tensor = drafter(decoder.embed_tokens(block), positions, attend)
    return hidden[0]


def draft_logits(decoder: Decoder, drafter: Drafter, context: Tensor, anchor: int) -> Tensor:
    """context [T] -> logits [G, Vd] of the block behind it."""
    logits = decoder.logits(draft_hidden(decoder, drafter, context, anchor))
    return logits if drafter.draft_ids is None else logits[:, drafter.draft_ids]
