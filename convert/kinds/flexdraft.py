"""The layout of a FlexDraft head: a `config.json` of the target's geometry with a `flexdraft_config`, and tensors.

    num_hidden_layers                                 layers that draft, the target's last ones
    flexdraft_config.target_layer_ids                 their ids, or the first of them alone: the split layer
    flexdraft_config.enable_anchor_bias_logits        true: there is no drafting without the calibration network
    flexdraft_config.anchor_bias_rank                 its hidden size
    flexdraft_config.anchored                         whether slot 0 holds the anchor; not in the release

    mask_embedding [E] · anchor_bias_mlp.{0,2}.{weight,bias} · layers.{i}.self_attn.{q,k,v,o}_proj, {q,k}_norm
    anchor_projection.weight [E, E], if anchored

The names are those of the authors' release. Its config.json has the block under the key `dflash_config`, where its own
loader does not find it: both keys are read, and refused if they differ. Its layers also hold MLPs and norms, which no
pass uses (the target's are): they are left out. Written: every field, and only what is used.

FP8 is described as in every checkpoint (`quantization.py`): of the attention's projections alone, not of K/V.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig, rope_fields
from d2sd.convert.checkpoint.layout import INERT, READ, check_geometry, geometry_fields, misfit, refuse_fp8
from d2sd.convert.checkpoint.own_files import read_draft_vocabulary
from d2sd.convert.checkpoint.quantization import KEY as QUANTIZATION
from d2sd.convert.drafter_kind import Code, DrafterKind
from d2sd.convert.kinds.dflash import refuse_unknown
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig, Role
from d2sd.modeling.drafters.flexdraft_config import FlexConfig, flex_parts
from d2sd.modeling.shapes import linear_parts
from d2sd.policies import DrafterRole

if TYPE_CHECKING:
    from d2sd.modeling.drafters.flexdraft import FlexHead

#: Modules that are never quantized, by the names of the layout.
UNQUANTIZED = ("anchor_bias_mlp*", "anchor_projection")
KEY, RELEASED_KEY = "flexdraft_config", "dflash_config"
_FAMILIES = ("llama", "qwen2", "qwen3")  # whose layers are all alike
_ARCHITECTURES = ("FlexDraftModel", "FlexDraftBiasModel")
_MARKED = tuple([name] for name in _ARCHITECTURES)
_TOP = READ | INERT | {"architectures", "block_size", "num_target_layers", KEY, RELEASED_KEY, QUANTIZATION}
_TOP |= {"mlp_bias", "layer_types", "sliding_window", "use_sliding_window"}
_INSIDE = {"target_layer_ids", "enable_anchor_bias_logits", "anchor_bias_rank", "anchored", "block_size"}
_INSIDE |= {"mask_token_id"}
#: Of the body's geometry, the fields that need not be the target's.
_OWN = ("num_hidden_layers", "max_position_embeddings")
_FROM_RELEASE = {
    f"anchor_bias_mlp.{index}.{part}": f"calibration.{layer}.{part}"
    for index, layer in ((0, "inner"), (2, "outer"))
    for part in ("weight", "bias")
}
_TO_RELEASE = {ours: theirs for theirs, ours in _FROM_RELEASE.items()}
#: In the release, and unused.
_UNUSED = re.compile(r"norm\.weight|layers\.\d+\.(mlp\.\w+_proj|input_layernorm|post_attention_layernorm)\.weight")


def is_marked(config: HFConfig) -> bool:
    """Whether a config is of a FlexDraft head, in this layout or as released."""
    block = config.values.get(RELEASED_KEY)
    marked = isinstance(block, dict) and "enable_anchor_bias_logits" in block
    return marked or config.values.get(KEY) is not None or config.values.get("architectures") in _MARKED


def read_flex_config(directory: Path, _declared: Role | None = None) -> FlexConfig:
    """Read config.json and the draft vocabulary; raises `CheckpointError` naming file and key. A head has no role."""
    config = HFConfig.read(directory)
    part = _block(config)
    config.only("model_type", *_FAMILIES)
    refuse_unknown(config, _TOP)
    refuse_unknown(part, _INSIDE)
    config.only("architectures", *_MARKED, None)
    body = {key: value for key, value in config.values.items() if key not in ("architectures", QUANTIZATION)}
    target = parse_target_config(HFConfig(body, config.where))
    if part.get("enable_anchor_bias_logits", bool, False) is not True:
        raise part.refuse(
            "The head has no calibration network, without which mask rows draft past the anchor.",
            "enable_anchor_bias_logits",
            "true",
            "use a head that was trained with it",
        )
    block = config.size("block_size")
    if block < 2 or part.get("block_size", int, block) != block:
        raise config.refuse("The block size is wrong.", "block_size", "2 or more, and the same wherever it stands")
    anchored = part.get("anchored", bool, False)
    small = "anchor_bias_mlp.0", "anchor_bias_mlp.2", *(["anchor_projection"] if anchored else [])
    refuse_fp8(
        directory,
        config,
        small,
        "FP8 is not supported in these parts of a FlexDraft head.",
        expected="FP8 in q_proj, k_proj, v_proj and o_proj only",
        fix="use the unquantized head, and set fp8.drafters",
    )
    num_target_layers = config.layers("num_target_layers")
    _check_layers(part, target.body.num_layers, num_target_layers)
    return FlexConfig(
        family=target.family,
        body=target.body,
        vocab_size=target.vocab_size,
        block_size=block,
        num_target_layers=num_target_layers,
        calibration_size=part.size("anchor_bias_rank"),
        anchored=anchored,
        draft_vocabulary=read_draft_vocabulary(directory, target.vocab_size, mask_token_id=-1),
    )


def _block(config: HFConfig) -> HFConfig:
    """`flexdraft_config`, or under the release's key; refused if both are there and differ."""
    keys = [key for key in (KEY, RELEASED_KEY) if config.values.get(key) is not None]
    if not keys:
        raise CheckpointError(
            "The checkpoint is not a FlexDraft head.",
            where=f"{config.where}: {KEY}",
            expected=f"{KEY}, or {RELEASED_KEY} as released",
        )
    block, *other = (config.part(key) for key in keys)
    if other and block.values != other[0].values:
        raise config.refuse(f"{KEY} and {RELEASED_KEY} disagree.", RELEASED_KEY, json.dumps(block.values))
    return block


def _check_layers(part: HFConfig, layers: int, num_target_layers: int) -> None:
    """Refuse layers that are not the target's last ones."""
    split = num_target_layers - layers
    if not 1 <= split < num_target_layers:
        raise CheckpointError(
            "The split layer is out of range.",
            where=f"{part.where.rpartition(': ')[0]}: num_hidden_layers",
            found=f"{layers} of {num_target_layers} layers draft",
            expected=f"1 to {num_target_layers - 1}",
        )
    ids = part.integers("target_layer_ids")
    if ids not in (tuple(range(split, num_target_layers)), (split,)):
        raise part.refuse(
            "The layers that draft are not the target's last ones.",
            "target_layer_ids",
            f"{split} to {num_target_layers - 1}, as num_hidden_layers and num_target_layers say",
        )


def check_flex(config: FlexConfig, target: DecoderConfig, role: DrafterRole, block_size: int, where: Path) -> None:
    """Refuse a head in another place than the first, or that was made for another target or block size."""
    if role is not DrafterRole.FIRST:
        raise CheckpointError(
            "A FlexDraft head cannot be a second drafter, since it does not draft behind prefixes.",
            where=where / "config.json",
            fix="name it as drafters.first, and no second one",
        )
    sizes, expected = geometry_fields(config.body), geometry_fields(target.body)
    pairs: list[tuple[str, object, object]] = [
        ("model_type", config.family, target.family),  # which says where else there are biases
        ("num_target_layers", config.num_target_layers, target.body.num_layers),
        ("vocab_size", config.vocab_size, target.vocab_size),
        *((key, size, expected[key]) for key, size in sizes.items() if key not in _OWN),
    ]
    check_geometry(pairs, config, target, where)
    if config.block_size != block_size:
        what = "The drafter was trained for another block size."
        fix = f"set tree.block_size to {config.block_size} in the recipe"
        raise misfit(what, where, "block_size", config.block_size, block_size, fix)


def geometry(config: FlexConfig) -> dict[str, JsonValue]:
    """Fields of a manifest of this kind alone."""
    return {"split_layer": config.split_layer, "calibration_size": config.calibration_size}


def vocabulary_mark(config: FlexConfig) -> str:
    """Text of the draft vocabulary in a fingerprint."""
    return f"draft_vocabulary {config.draft_vocabulary}"


def flex_linears(config: FlexConfig) -> list[str]:
    """Names of a head's layers that can be FP8."""
    return [name for name in linear_parts(flex_parts(config)) if name.startswith("layers.")]


def our_name(name: str) -> str | None:
    """Our module's name of a tensor; None for those of the release that no pass uses."""
    if _UNUSED.fullmatch(name):
        return None
    return _FROM_RELEASE.get(name, name)


def released_name(name: str) -> str:
    """The layout's name of a tensor of our module."""
    return _TO_RELEASE.get(name, name)


def config_fields(config: FlexConfig) -> dict[str, object]:
    """Every field of `config.json` but the tensors' type and the quantization."""
    return {
        **geometry_fields(config.body),
        **rope_fields(config.body.rope),
        "architectures": [_ARCHITECTURES[0]],
        "block_size": config.block_size,
        KEY: {
            "anchor_bias_rank": config.calibration_size,
            "anchored": config.anchored,
            "enable_anchor_bias_logits": True,
            "target_layer_ids": list(range(config.split_layer, config.num_target_layers)),
        },
        "model_type": config.family,
        "num_target_layers": config.num_target_layers,
        "vocab_size": config.vocab_size,
    }


def _code() -> Code[FlexHead]:
    from d2sd.convert.onnx.bodies import FlexBody
    from d2sd.modeling.drafters.flexdraft import FlexHead

    return Code(FlexHead, FlexBody, FlexHead.join)


KIND: DrafterKind[FlexConfig, FlexHead] = DrafterKind(
    code=_code,
    parts=flex_parts,
    is_marked=is_marked,
    read_config=read_flex_config,
    check=check_flex,
    config_fields=config_fields,
    unquantized=UNQUANTIZED,
    mark=vocabulary_mark,
    geometry=geometry,
    fp8_layers=flex_linears,
    our_name=our_name,
    file_name=released_name,
)
