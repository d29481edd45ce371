"""The speculators format (`DFlashSpeculatorConfig` and its heirs): its config, read and written, and its extra tensors.

The body is in `transformer_layer_config` and layer ids index the target's hidden states. The format has no field for
the number of target layers or for training on variable prefixes: d2sd writes both under the key `d2sd`, which
speculators' loader accepts. A file without that key needs the target, and a second drafter's role must be declared.

The extra tensors are copies of the target's embedding and head, and the draft vocabulary, V target tokens and Vd draft
tokens. Versions up to 0.7 write both copies, versions from 0.8 only the head of a reduced vocabulary; t2d and d2t are
present if the vocabulary is reduced. Both encode the same ids; a file in which they differ, or whose d2t holds the ids
themselves, is refused.

    t2d [V] bool      which tokens can be drafted
    d2t [Vd] int64    an *offset*: draft token i is target token i + d2t[i]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from d2sd.convert.checkpoint import heads
from d2sd.convert.checkpoint.attention import KEYS as ATTENTION
from d2sd.convert.checkpoint.attention import check_windows, read_speculators_attention
from d2sd.convert.checkpoint.head_layout import Places
from d2sd.convert.checkpoint.headers import TensorInfo
from d2sd.convert.checkpoint.hf_config import HFConfig, rope_fields
from d2sd.convert.checkpoint.layout import (
    INERT,
    READ,
    body_fields,
    fault,
    from_hidden_states,
    read_body,
    read_role,
    to_hidden_states,
)
from d2sd.convert.checkpoint.own_files import check_ids
from d2sd.convert.checkpoint.unsupported import KEYS
from d2sd.convert.checkpoint.weights import read_tensor
from d2sd.convert.formats.shared_tensors import EMBEDDING, HEAD, TargetParts, check_copies, shared_copies
from d2sd.convert.kinds.dflash import mask_id, refuse_unknown
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DrafterConfig, Role

#: Transformers' defaults of the body: a saved nested config may contain only the differences from them.
QWEN3_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "rope_theta": 10000.0,
}
_TOP = (
    INERT
    | KEYS
    | heads.KEYS
    | ATTENTION
    | {
        "architectures",
        "aux_hidden_state_layer_ids",
        "block_size",
        "draft_vocab_size",
        "mask_token_id",
        "target_hidden_size",
        "transformer_layer_config",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "d2sd",
        "max_anchors",  # a training key of version 0.5
        "sliding_window_non_causal",
    }
)
#: Kinds of speculators, by `speculators_model_type`, and their architectures: the one that is written, and others.
KINDS: Mapping[str, tuple[str, ...]] = {
    "dflash": ("DFlashSpeculator", heads.PLAIN),
    **{one.speculators_type: (*one.architectures, heads.PLAIN) for one in heads.HEADS if one.speculators_type},
}
_NESTED = READ | INERT | KEYS | ATTENTION | {"architectures"}
_OWN = {"num_target_layers", "training_mode", "prefix_weight_base"}
_SPECULATION = {"algorithm", "proposal_methods", "default_proposal_method", "verifier"}


def read_speculators(config: HFConfig, num_target_layers: int | None, declared: Role | None = None) -> DrafterConfig:
    """Read the config, ids in the file's order, without the draft vocabulary; raises `CheckpointError`.

    `num_target_layers` is the target's where it is known.
    """
    nested = config.part("transformer_layer_config")
    section = HFConfig(config.get("d2sd", dict, {}), f"{config.where}: d2sd")
    for part, known in ((config, _TOP), (nested, _NESTED), (section, _OWN)):
        refuse_unknown(part, known)
    places, kind = Places(config), config.get("speculators_model_type", str)
    head = heads.find_head(places)
    if head and head.speculators_type != kind:
        what = f"This kind of speculator has no {head.name} head."
        raise config.refuse(what, "speculators_model_type", head.speculators_type or "the layout of z-lab")
    config.only("architectures", *([name] for name in KINDS[kind]), None)
    of_kind = next((one for one in heads.HEADS if one.speculators_type == kind), None)
    from_anchor = heads.read_slots(places, of_kind)
    _check_speculation(config, kind, config.size("block_size") - (not from_anchor))
    nested = HFConfig({**_defaults(nested), **nested.values}, nested.where)
    body, vocab_size = read_body(nested), nested.size("vocab_size")
    ahead = of_kind is not None and of_kind.windows_ahead
    body = replace(body, **read_speculators_attention(config, nested, body.num_layers, ahead=ahead))
    check_windows(nested, body, config.size("block_size"))
    config.only("target_hidden_size", None, body.hidden_size)
    role, base = read_role(section, declared)
    layers = _target_layers(config, section, num_target_layers)
    return DrafterConfig(
        body=body,
        vocab_size=vocab_size,
        block_size=config.size("block_size"),
        mask_token_id=mask_id(config, vocab_size),
        target_layer_ids=_layer_ids(config, layers),
        num_target_layers=layers,
        role=role,
        prefix_weight_base=base,
        sample_from_anchor=from_anchor,
        head=None if head is None else head.read(Places(config, nested)),
    )


def config_fields(
    config: DrafterConfig, dtype: torch.dtype, verifier: str, architectures: list[str]
) -> dict[str, object]:
    """Every field of `config.json`; `verifier` names the target, of `architectures`."""
    name = str(dtype).removeprefix("torch.")
    rope = rope_fields(config.body.rope)
    scaling: Any = rope["rope_scaling"] or {"rope_type": "default"}
    vocabulary = config.draft_vocabulary
    head = heads.layout_of(config.head) if config.head else None
    kind = head.speculators_type or "dflash" if head else "dflash"
    return {
        **(head.fields(config.head) if head else {}),
        "architectures": [KINDS[kind][0]],
        "aux_hidden_state_layer_ids": to_hidden_states(config.target_layer_ids),
        "block_size": config.block_size,
        "d2sd": {
            "num_target_layers": config.num_target_layers,
            "prefix_weight_base": config.prefix_weight_base,
            "training_mode": "dflash" if config.role == "first" else "vp_drafter",
        },
        "draft_vocab_size": config.vocab_size if vocabulary is None else len(vocabulary),
        "dtype": name,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": bool(config.body.windows) and not config.body.causal,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": config.drafts,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": architectures, "name_or_path": verifier},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",  # its reader was tested on these files
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **body_fields(config.body),
            "dtype": name,
            "vocab_size": config.vocab_size,
            "rope_parameters": {**scaling, "rope_theta": rope["rope_theta"]},
        },
    }


def check_writable(config: DrafterConfig, where: str) -> None:
    """Refuse what the format has no key for, and a drafter of the target's last layer: speculators' tools omit that
    state, so fc's width differs.
    """
    body = config.body
    by_window = tuple(window is not None for window in body.windows)
    head = heads.layout_of(config.head) if config.head else None
    for what, there in (
        (f"with a {head.name} head" if head else "", head is not None and head.speculators_type is None),
        ("whose layers without a window are causal", bool(body.causal) and body.causal != by_window),
        ("with attention sinks", body.sinks),
        ("with a mask embedding of its own", config.mask_embedding),
    ):
        if there:
            raise CheckpointError(
                f"The speculators format does not support a drafter {what}.", where=where, fix="convert it to z-lab"
            )
    if max(config.target_layer_ids) == config.num_target_layers - 1:
        raise CheckpointError(
            "The speculators format does not support a drafter that reads the target's last layer.",
            where=where,
            found=f"target layer ids {list(config.target_layer_ids)}",
            expected=f"0 to {config.num_target_layers - 2}",
        )


def _defaults(nested: HFConfig) -> dict[str, object]:
    theta_elsewhere = nested.values.get("rope_parameters") is not None
    return {key: value for key, value in QWEN3_DEFAULTS.items() if key != "rope_theta" or not theta_elsewhere}


def _check_speculation(config: HFConfig, kind: str, drafts: int) -> None:
    if config.values.get("speculators_config") is None:
        return
    part = config.part("speculators_config")
    refuse_unknown(part, _SPECULATION)
    part.only("algorithm", kind)
    for method in part.get("proposal_methods", list, []):
        count = method.get("speculative_tokens") if isinstance(method, dict) else None
        if count is not None and not (type(count) is int and 1 <= count <= drafts):
            raise part.refuse(
                "A block cannot draft that many tokens.", "proposal_methods", f"1 to {drafts}, as block_size allows"
            )


def _layer_ids(config: HFConfig, num_target_layers: int) -> tuple[int, ...]:
    """Ids 1 to L-1: state 0 is the embedding, and speculators reserves the last one for its training targets."""
    key = "aux_hidden_state_layer_ids"
    ids = from_hidden_states(config.integers(key))
    if fault(ids, num_target_layers - 1):
        raise config.refuse("The target layer ids are wrong.", key, f"different ones, 1 to {num_target_layers - 1}")
    return ids


def _target_layers(config: HFConfig, section: HFConfig, known: int | None) -> int:
    written = section.layers("num_target_layers") if "num_target_layers" in section.values else None
    if written is not None and known not in (None, written):
        raise section.refuse("The drafter was made for another target.", "num_target_layers", known)
    layers = written or known
    if layers is None:
        raise CheckpointError(
            "The speculators checkpoint does not contain the number of target layers.",
            where=config.where,
            fix="name the target: --target DIR",
        )
    return layers


EXTRA = (EMBEDDING, HEAD, "t2d", "d2t")
_TYPES = {"t2d": "BOOL", "d2t": "I64"}


def read_extra(
    config: DrafterConfig,
    size: int,
    headers: Mapping[str, TensorInfo],
    target: TargetParts | None,
    dtype: torch.dtype,
    where: str,
) -> tuple[tuple[int, ...] | None, list[str]]:
    """Return the draft vocabulary, and notes on the copies; raises `CheckpointError`.

    `headers` are of the extra tensors, `size` is draft_vocab_size of the config at `where`, `dtype` the drafter's.
    """
    _check_headers(config, size, headers)
    missing = [name for name in ("t2d", "d2t") if name not in headers]
    if missing and (size != config.vocab_size or len(missing) == 1):
        raise CheckpointError(
            "A draft vocabulary needs both of its tensors.",
            where=f"{where}: draft_vocab_size",
            found=size,
            expected=f"{' and '.join(missing)} among the tensors, or {config.vocab_size} as vocab_size",
        )
    copies = {name: read_tensor(info.file, name) for name, info in headers.items()}
    ids = None
    if not missing:
        file = str(headers["d2t"].file)
        ids = from_tensors(copies, size, config.vocab_size, file)
        if size == config.vocab_size:
            ids = None  # all tokens, which needs no vocabulary
        else:
            check_ids(f"{file}: d2t", list(ids), config.vocab_size, config.mask_token_id)
    dropped = [name for name in (EMBEDDING, HEAD) if name in copies]
    if not dropped:
        return ids, []
    if target is None:
        return ids, [f"{' and '.join(dropped)}: dropped unchecked; pass --target to compare with the target's"]
    check_copies(copies, target, ids, dtype, str(headers[dropped[0]].file))
    return ids, [f"{' and '.join(dropped)}: equal to the target's, dropped"]


def extra_tensors(config: DrafterConfig, target: TargetParts, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make the copies of the target's tensors, and those of a draft vocabulary."""
    if target.config.embedding_scale != 1:
        raise CheckpointError(
            "A speculators drafter reads embeddings as they are stored; this target scales them.",
            where=target.folder,
            found=target.config.family,
            fix="convert it to z-lab",
        )
    ids = config.draft_vocabulary
    return shared_copies(target, ids, dtype) | (to_tensors(ids, config.vocab_size) if ids else {})


def _check_headers(config: DrafterConfig, size: int, headers: Mapping[str, TensorInfo]) -> None:
    hidden = config.body.hidden_size
    shapes = {EMBEDDING: (config.vocab_size, hidden), HEAD: (size, hidden), "t2d": (config.vocab_size,), "d2t": (size,)}
    for name, info in headers.items():
        kind = _TYPES.get(name, info.dtype)
        if info.shape != shapes[name] or info.dtype != kind:
            raise CheckpointError(
                "A tensor has the wrong shape or type.",
                where=f"{info.file}: {name}",
                found=f"{info.dtype} {list(info.shape)}",
                expected=f"{kind} {list(shapes[name])}",
            )


def to_tensors(ids: tuple[int, ...], vocab_size: int) -> dict[str, Tensor]:
    """Ascending ids -> t2d and d2t."""
    tokens = torch.tensor(ids)
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[tokens] = True
    return {"t2d": marked, "d2t": tokens - torch.arange(len(ids))}


def from_tensors(tensors: Mapping[str, Tensor], size: int, vocab_size: int, where: str) -> tuple[int, ...]:
    """t2d and d2t, of checked shapes, -> ascending ids; raises `CheckpointError` naming the tensor of `where`.

    `size` is the config's draft_vocab_size.
    """
    marked, offsets = tensors["t2d"], tensors["d2t"]
    ids = offsets + torch.arange(size)
    expected = marked.nonzero().flatten()
    if len(expected) != size:
        raise CheckpointError(
            "t2d marks a different number of tokens than draft_vocab_size.",
            where=f"{where}: t2d",
            found=len(expected),
            expected=size,
        )
    if torch.equal(offsets, expected) and not torch.equal(ids, expected):
        raise CheckpointError(
            "d2t holds target tokens, not offsets.",
            where=f"{where}: d2t",
            found=offsets[:8].tolist(),
            expected=f"{(offsets - torch.arange(size))[:8].tolist()}: draft token i is target token i + d2t[i]",
        )
    if not torch.equal(ids, expected):
        index = int((ids != expected).nonzero()[0])
        raise CheckpointError(
            "t2d and d2t do not name the same tokens.",
            where=f"{where}: d2t[{index}]",
            found=f"target token {int(ids[index])}",
            expected=f"{int(expected[index])}, the next that t2d marks",
        )
    return tuple(ids.tolist())
