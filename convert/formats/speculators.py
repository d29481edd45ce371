"""The speculators config (`DFlashSpeculatorConfig`), read and written; tensors are in read.py, write.py, vocabulary.py.

The body is in `transformer_layer_config` and layer ids index the target's hidden states. The format has no field for
the number of target layers or for training on variable prefixes: d2sd writes both under the key `d2sd`, which
speculators' loader accepts. A file without that key needs the target, and a second drafter's role must be declared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from d2sd.convert.checkpoint.backbone import INERT, READ, body_fields, read_body
from d2sd.convert.checkpoint.dflash import mask_id, refuse_unknown
from d2sd.convert.checkpoint.hf_config import HFConfig, rope_fields
from d2sd.convert.checkpoint.layer_ids import fault, from_convention, to_convention
from d2sd.convert.checkpoint.roles import read_role
from d2sd.convert.checkpoint.unsupported import KEYS
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DrafterConfig, Role

#: Transformers' defaults of the body: a saved nested config may contain only the differences from them.
QWEN3_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "attention_bias": False, "rope_theta": 10000.0,
}  # fmt: skip
_TOP = (
    INERT
    | KEYS
    | {
        "architectures", "aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "mask_token_id",
        "target_hidden_size", "transformer_layer_config", "speculators_config", "speculators_model_type",
        "speculators_version", "d2sd",
        "max_anchors",  # a training key of version 0.5
        "sliding_window_non_causal",  # of windowed layers, and those are refused
    }
)  # fmt: skip
_NESTED = READ | INERT | KEYS | {"architectures"}
_OWN = {"num_target_layers", "training_mode", "prefix_weight_base"}
_SPECULATION = {"algorithm", "proposal_methods", "default_proposal_method", "verifier"}


def read_speculators(config: HFConfig, num_target_layers: int | None, declared: Role | None = None) -> DrafterConfig:
    """Read the config, ids in the file's order, without the draft vocabulary; raises `CheckpointError`.

    `num_target_layers` is the target's where it is known.
    """
    nested = config.part("transformer_layer_config")
    own = HFConfig(config.get("d2sd", dict, {}), f"{config.where}: d2sd")
    for part, known in ((config, _TOP), (nested, _NESTED), (own, _OWN)):
        refuse_unknown(part, known)
    _check_speculation(config)
    config.only("architectures", ["DFlashSpeculator"], ["DFlashDraftModel"], None)
    nested = HFConfig({**_defaults(nested), **nested.values}, nested.where)
    body, vocab_size = read_body(nested), nested.size("vocab_size")
    config.only("target_hidden_size", None, body.hidden_size)
    role, base = read_role(own, declared)
    layers = _target_layers(config, own, num_target_layers)
    return DrafterConfig(
        body=body,
        vocab_size=vocab_size,
        block_size=config.size("block_size"),
        mask_token_id=mask_id(config, vocab_size),
        target_layer_ids=_layer_ids(config, layers),
        num_target_layers=layers,
        role=role,
        prefix_weight_base=base,
    )


def draft_vocab_size(config: HFConfig) -> int:
    """Read draft_vocab_size, which is required here; speculators defaults to 32000."""
    return config.size("draft_vocab_size")


def config_text(config: DrafterConfig, dtype: torch.dtype, verifier: str, architectures: list[str]) -> str:
    """The text of `config.json`; `verifier` names the target, of `architectures`."""
    name = str(dtype).removeprefix("torch.")
    rope = rope_fields(config.body.rope)
    scaling: Any = rope["rope_scaling"] or {"rope_type": "default"}
    vocabulary = config.draft_vocabulary
    fields = {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": to_convention(config.target_layer_ids, "hidden_states"),
        "block_size": config.block_size,
        "d2sd": {
            "num_target_layers": config.num_target_layers,
            "prefix_weight_base": config.prefix_weight_base,
            "training_mode": "dflash" if config.role == "first" else "vp_drafter",
        },
        "draft_vocab_size": config.vocab_size if vocabulary is None else len(vocabulary),
        "dtype": name,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "accept_tolerance": 0.0, "proposal_type": "greedy",
                "speculative_tokens": config.block_size - 1, "verifier_accept_k": 1,
            }],
            "verifier": {"architectures": architectures, "name_or_path": verifier},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",  # its reader was tested on these files
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **body_fields(config.body), "dtype": name, "vocab_size": config.vocab_size,
            "rope_parameters": {**scaling, "rope_theta": rope["rope_theta"]},
        },
    }  # fmt: skip
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def check_writable(config: DrafterConfig, where: str) -> None:
    """Refuse a drafter of the target's last layer: speculators' tools omit that state, so fc's width differs."""
    if max(config.target_layer_ids) == config.num_target_layers - 1:
        raise CheckpointError(
            "The speculators format does not support a drafter that reads the target's last layer.", where=where,
            found=f"target layer ids {list(config.target_layer_ids)}", expected=f"0 to {config.num_target_layers - 2}",
        )  # fmt: skip


def _defaults(nested: HFConfig) -> dict[str, object]:
    theta_elsewhere = nested.values.get("rope_parameters") is not None
    return {key: value for key, value in QWEN3_DEFAULTS.items() if key != "rope_theta" or not theta_elsewhere}


def _check_speculation(config: HFConfig) -> None:
    if config.values.get("speculators_config") is None:
        return
    part = config.part("speculators_config")
    refuse_unknown(part, _SPECULATION)
    part.only("algorithm", "dflash")
    drafts = config.size("block_size") - 1
    for method in part.get("proposal_methods", list, []):
        found = method.get("speculative_tokens") if isinstance(method, dict) else None
        if found is not None and not (type(found) is int and 1 <= found <= drafts):
            raise part.refuse(
                "A block cannot draft that many tokens.", "proposal_methods", f"1 to {drafts}, block_size - 1"
            )


def _layer_ids(config: HFConfig, num_target_layers: int) -> tuple[int, ...]:
    """Ids 1 to L-1: state 0 is the embedding, and speculators reserves the last one for its training targets."""
    key = "aux_hidden_state_layer_ids"
    ids = from_convention(config.integers(key), "hidden_states")
    if fault(ids, num_target_layers - 1):
        raise config.refuse("The target layer ids are wrong.", key, f"different ones, 1 to {num_target_layers - 1}")
    return ids


def _target_layers(config: HFConfig, own: HFConfig, known: int | None) -> int:
    written = own.layers("num_target_layers") if "num_target_layers" in own.values else None
    if written is not None and known not in (None, written):
        raise own.refuse("The drafter was made for another target.", "num_target_layers", known)
    layers = written or known
    if layers is None:
        raise CheckpointError(
            "The speculators checkpoint does not contain the number of target layers.", where=config.where,
            fix="name the target: --target DIR",
        )  # fmt: skip
    return layers
