"""The DFlash layout of a drafter: a `config.json` with the body at the top level and a `dflash_config`.

Read: z-lab, ModelOpt and SpecForge write it, with differences that do not affect the forward pass except for the role,
so one strict reader serves all three. A key that the reader does not know is refused: it may change what tensors mean.
What a head adds, which scores candidates behind their parents, is in `heads.py`.

Written: z-lab's spelling, with every field, because readers fill gaps with their own defaults; Edge-LLM, for example,
uses block size 16, mask 248070, layers 1, 8, 15, 22, 29 and a causal block. Embedding and head are not written, since
the target has them. A second drafter is marked by `training_mode: vp_drafter`, as in SpecForge.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from d2sd.convert.checkpoint import heads
from d2sd.convert.checkpoint.attention import KEYS as ATTENTION
from d2sd.convert.checkpoint.attention import causality, check_windows, read_attention
from d2sd.convert.checkpoint.dspark import DEEPSPEC
from d2sd.convert.checkpoint.head_layout import Places
from d2sd.convert.checkpoint.headers import has_weights, read_headers
from d2sd.convert.checkpoint.hf_config import MAX_LAYERS, MAX_SIZE, HFConfig, rope_fields
from d2sd.convert.checkpoint.layout import (
    INERT,
    READ,
    TRAINING,
    body_fields,
    check_geometry,
    fault,
    misfit,
    read_body,
    read_role,
    refuse_fp8,
    usual_ids,
)
from d2sd.convert.checkpoint.own_files import read_draft_vocabulary
from d2sd.convert.checkpoint.quantization import KEY
from d2sd.convert.checkpoint.unsupported import KEYS, refuse_unsupported
from d2sd.convert.drafter_kind import Code, DrafterKind
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig, DrafterConfig, Role
from d2sd.modeling.shapes import drafter_parts, linear_parts
from d2sd.policies import DrafterRole

if TYPE_CHECKING:
    from d2sd.modeling.drafters.dflash import Drafter

#: Modules that checkpoints hold in 16 bits, because other engines cannot run them in FP8; see `own_files.py`.
UNQUANTIZED = ("lm_head", "*embed_tokens", "*fc", "*.q_proj", "*.k_proj", "*.v_proj", *heads.UNQUANTIZED)
_BODY = re.compile(r"layers\.\d+\.(self_attn|mlp)\.\w+")
#: Beginnings of tensors' names as others write them -> as z-lab does: EAGLE's heirs, Muse's assistant.
_RENAMED = {"midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_SINKS, _OUR_SINKS = ".self_attn.attention_sink_bias", ".self_attn.sinks"
#: The tensor [E] of a drafter that embeds masks by itself, and the same in a pickle (MiMo).
MASK_EMBEDDING, PICKLED = "mask_embedding", "mask_embedding.pt"
_EITHER = KEYS | ATTENTION | heads.KEYS | {"block_size", "num_target_layers", "mask_token_id", "target_hidden_size"}
_TOP = _EITHER | READ | INERT | {"architectures", "dflash_config", "final_logit_softcapping"}
#: Of the mask, the id is what counts: the tokenizer may not know `mask_token`.
_INSIDE = _EITHER | TRAINING | {"target_layer_ids", "mask_token"}


def read_drafter_config(directory: Path, declared: Role | None = None) -> DrafterConfig:
    """Read a `config.json` of the DFlash layout and the draft vocabulary; raises `CheckpointError` naming file and key.

    `declared` is the role of a drafter whose config has none. FP8 may be described; `formats/` reads every format,
    unquantized, and converts it to this one.
    """
    raw = HFConfig.read(directory)
    plain = HFConfig({key: value for key, value in raw.values.items() if key != KEY}, raw.where)
    refuse_unsupported(plain)
    others = {"speculators_model_type": "speculators"}
    if plain.values.get("architectures") == [DEEPSPEC]:
        others["architectures"] = "DeepSpec"
    for key, writer in others.items():
        if plain.values.get(key) is not None:
            raise CheckpointError(
                f"A recipe's drafter must be in the DFlash layout, and this is a {writer} checkpoint.",
                where=f"{raw.where}: {key}",
                fix="d2sd convert --to z-lab",
            )
    config = read_layout(plain, declared)
    sliced = (f"layers.{layer}.self_attn.{kind}_proj" for layer in range(config.body.num_layers) for kind in "qkv")
    refuse_fp8(
        directory,
        raw,
        ["fc", *sliced],
        "Engines do not support FP8 in these layers of a drafter.",
        expected="FP8 in o_proj and the MLP only, and more by d2sd_fp8.json",
        fix="use the unquantized drafter, and set fp8.drafters",
    )
    ids = read_draft_vocabulary(directory, config.vocab_size, config.mask_token_id)
    return replace(config, draft_vocabulary=ids, mask_embedding=has_mask_embedding(directory))


def has_mask_embedding(directory: Path) -> bool:
    """Whether the tensors embed masks; raises `CheckpointError` where a pickle does. No key of a config says it."""
    if (directory / PICKLED).exists():
        raise CheckpointError(
            "The mask embedding is a pickle, and pickles are never opened: they can run code.",
            where=directory / PICKLED,
            fix=f"if you trust it, load it with torch.load, and save it as {MASK_EMBEDDING} in model.safetensors",
        )
    return has_weights(directory) and MASK_EMBEDDING in read_headers(directory)


def our_name(name: str) -> str | None:
    """Our module's name of a tensor; None for those that it does not have."""
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return heads.our_name(name.removesuffix(_SINKS) + _OUR_SINKS if name.endswith(_SINKS) else name)


def file_name(name: str) -> str:
    """The name of our module's tensor in files."""
    name = next((theirs for theirs, ours in heads.LOOSE.items() if ours == name), name)
    return name.removesuffix(_OUR_SINKS) + _SINKS if name.endswith(_OUR_SINKS) else name


def check_drafter(
    config: DrafterConfig, target: DecoderConfig, role: DrafterRole, _block_size: int, where: Path
) -> None:
    """Refuse a drafter that was not made for this target or this role. Blocks of any size run (`ModelRunner`).

    Such a drafter would run, and almost none of its tokens would be accepted.
    """
    expected: Role = "first" if role is DrafterRole.FIRST else "variable_prefix"
    if config.role != expected:
        fix = None
        if expected == "variable_prefix":
            fix = "if it was trained on variable prefixes: d2sd convert --role variable_prefix"
        raise misfit("The drafter does not fit.", where, "dflash_config.training_mode", config.role, expected, fix)
    check_target(config, target, where)
    ids = config.target_layer_ids
    if not all(a < b for a, b in pairwise(ids)):
        # fc's columns follow the config's order, and TensorRT-LLM sorts the ids: only ascending ids are unambiguous.
        what, key = "The target layer ids are not in ascending order.", "dflash_config.target_layer_ids"
        fix = "d2sd convert --to z-lab, which also reorders the columns of fc"
        raise misfit(what, where, key, list(ids), sorted(ids), fix)


def check_target(config: DrafterConfig, target: DecoderConfig, where: Path) -> None:
    """Refuse a drafter that was made for another target."""
    pairs: list[tuple[str, object, object]] = [
        ("hidden_size", config.body.hidden_size, target.body.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.body.num_layers),
    ]
    if config.logit_cap is not None:
        pairs.append(("final_logit_softcapping", config.logit_cap, target.logit_cap))
    check_geometry(pairs, config, target, where)


def geometry(config: DrafterConfig) -> dict[str, JsonValue]:
    """Fields of a manifest of this kind alone."""
    return {
        "role": config.role,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        **({"sample_from_anchor": True} if config.sample_from_anchor else {}),
        **({"head": config.head.name} if config.head else {}),
    }


def drafter_linears(config: DrafterConfig) -> list[str]:
    """Names of a drafter's layers that can be FP8: those of its body."""
    return [name for name in linear_parts(drafter_parts(config)) if name == "fc" or _BODY.fullmatch(name)]


def mark(config: DrafterConfig) -> str:
    """Text in a fingerprint of what a config alone determines: the draft vocabulary, and what plain drafters lack."""
    parts = [] if config.draft_vocabulary is None else [f"draft_vocabulary {list(config.draft_vocabulary)}"]
    if config.body.windows or config.body.causal:
        parts.append(f"views {config.body.views}")
    if config.sample_from_anchor:
        parts.append("sample_from_anchor")
    return " ".join(parts)


def read_layout(config: HFConfig, declared: Role | None = None, own: HFConfig | None = None) -> DrafterConfig:
    """Read a config of the DFlash layout, layer ids in the file's order; raises `CheckpointError`.

    `declared` is the role of a drafter whose config has none. `own`: the drafter's keys, where no dflash_config has
    them.
    """
    dflash = own or config.part("dflash_config")
    for part, known in ((config, _TOP), (dflash, _INSIDE)):
        refuse_unknown(part, known)
    places = Places(dflash, config)
    head = heads.find_head(places)
    names = [[name] for name in (head.architectures if head else ())]  # ModelOpt keeps DFlash's name
    config.only("architectures", [heads.PLAIN], *names, ["Qwen3ForCausalLM"])  # SpecForge copies the target's config
    # Qwen3.5 drafters keep these two inside dflash_config, others at the top level or in both.
    either = Places(config, dflash)
    block_size = either.home("block_size").size("block_size", limit=MAX_SIZE)
    num_target_layers = either.home("num_target_layers").size("num_target_layers", limit=MAX_LAYERS)
    body = replace(read_body(config), **read_attention(config, dflash, config.layers("num_hidden_layers")))
    if head and head.causal:
        body = replace(body, causal=(True,) * body.num_layers)
    check_windows(config, body, block_size)
    for part in (config, dflash):  # JetSpec's, which adapts targets of another width
        part.only("target_hidden_size", None, body.hidden_size)
    role, base = read_role(dflash, declared)
    return DrafterConfig(
        body=body,
        vocab_size=config.size("vocab_size"),
        block_size=block_size,
        mask_token_id=mask_id(either.home("mask_token_id"), config.size("vocab_size")),
        target_layer_ids=_layer_ids(dflash, body.num_layers, num_target_layers),
        num_target_layers=num_target_layers,
        role=role,
        prefix_weight_base=base,
        sample_from_anchor=heads.read_slots(places, head),
        head=None if head is None else head.read(places),
        logit_cap=config.logit_cap(),
    )


def refuse_unknown(config: HFConfig, known: frozenset[str] | set[str]) -> None:
    """Refuse a key outside `known`."""
    unknown = sorted(config.values.keys() - known)
    if unknown:
        raise config.refuse("A drafter's config key is unknown, and may change its meaning.", unknown[0], "no such key")


def mask_id(config: HFConfig, vocab_size: int) -> int:
    """Read mask_token_id; the tokenizer's mask token is not used because it may be a different one."""
    value = config.get("mask_token_id", int)
    if not 0 <= value < vocab_size:
        raise config.refuse("The mask token is outside the vocabulary.", "mask_token_id", f"0 to {vocab_size - 1}")
    return value


def _layer_ids(dflash: HFConfig, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    if dflash.values.get("target_layer_ids") is None:
        raise CheckpointError(
            "The config does not list the target layers that the drafter reads.",
            where=f"{dflash.where}: target_layer_ids",
            expected="a list of layer ids",
            fix=f"some readers then use {usual_ids(num_layers, num_target_layers)}; write that into the config if it "
            "was trained with them",
        )
    ids = dflash.integers("target_layer_ids")
    expected = fault(ids, num_target_layers)
    if expected:
        raise dflash.refuse("The target layer ids are wrong.", "target_layer_ids", expected)
    return ids


def config_fields(config: DrafterConfig) -> dict[str, object]:
    """Every field of `config.json` but the tensors' type and the quantization."""
    layout = heads.layout_of(config.head) if config.head else None
    of_head = layout.fields(config.head) if layout else {}
    if layout and layout.projector:
        of_head["projector_type"] = layout.projector
    if layout or config.sample_from_anchor:
        of_head["sample_from_anchor"] = config.sample_from_anchor
    causal = causality(config.body)
    stated: dict[str, object] = {} if causal is None else {"is_causal": causal}
    sinks: dict[str, object] = {"attention_sink_bias": True} if config.body.sinks else {}
    return {
        **body_fields(config.body),
        **rope_fields(config.body.rope),
        **(stated if config.body.windows or causal else {}),  # first in the order in which vLLM looks
        "architectures": [(*layout.architectures, heads.PLAIN)[0] if layout else heads.PLAIN],
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            **stated,
            **sinks,
            "mask_token_id": config.mask_token_id,
            "num_target_layers": config.num_target_layers,
            "prefix_weight_base": config.prefix_weight_base,
            "target_layer_ids": list(config.target_layer_ids),
            "training_mode": "dflash" if config.role == "first" else "vp_drafter",
            **of_head,
        },
        "num_target_layers": config.num_target_layers,
        "vocab_size": config.vocab_size,
        **({} if config.logit_cap is None else {"final_logit_softcapping": config.logit_cap}),
    }


def _code() -> Code[Drafter]:
    from d2sd.convert.onnx.bodies import DrafterBody
    from d2sd.modeling.drafters.dflash import Drafter

    return Code(Drafter, DrafterBody, Drafter.join)


KIND: DrafterKind[DrafterConfig, Drafter] = DrafterKind(
    code=_code,
    parts=drafter_parts,
    is_marked=lambda _: True,
    read_config=read_drafter_config,
    check=check_drafter,
    config_fields=config_fields,
    unquantized=UNQUANTIZED,
    mark=mark,
    geometry=geometry,
    fp8_layers=drafter_linears,
    our_name=our_name,
    file_name=file_name,
)
