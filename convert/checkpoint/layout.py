"""The parts that layouts of drafters share: the body's keys, layer ids, the role, and the checks that a drafter fits.

The Qwen3-shaped body of a config is at the top level (z-lab) or nested (speculators). All conversions of target layer
ids are in this file; a drafter read with the wrong convention runs, and is accepted slightly less: only the format
determines the convention.

    convention          id i means                            formats
    output_of_layer     output of layer i, hidden_states[i+1] z-lab, ModelOpt, SpecForge; `DrafterConfig`
    hidden_states       hidden_states[i]; 0 is the embedding  speculators

The role, first or variable-prefix, is in keys that SpecForge's training writes into the config. A run with
`--loss-type vp_drafter` and a config without `training_mode` writes a variable-prefix drafter that looks like a first
one: the loss type is only in `training_state.pt`, a pickle, which is never opened. The user then has to declare the
role (`declared`).

Rows of a block attend, layer by layer, by

    window      layer_types says which layers have one, sliding_window how wide it is, the row itself included
                use_swa and swa_window_size in dflash_config: every layer has one, whatever layer_types says (ModelOpt)
    causality   is_causal at the top level, causal, is_causal or causal_head (JetSpec) in dflash_config: of all layers
                none of them: a layer is causal if layer_types makes it a sliding one, as vLLM runs z-lab's drafters
                speculators: sliding_window_non_causal, of layers with a window; others are never causal
    sinks       attention_sink_bias; add_swa_attention_sink_bias, of layers with a window

Readers differ in which key wins where two disagree, so a config that says two things is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2sd.convert.checkpoint.hf_config import MAX_SIZE, HFConfig, rope_fields
from d2sd.convert.checkpoint.quantization import FILE, KEY, read_drafter_quantization
from d2sd.errors import CheckpointError
from d2sd.modeling.config import BodyConfig, DecoderConfig, DraftConfig, Role, RopeConfig

if TYPE_CHECKING:
    from torch import Tensor

_SLIDING, _FULL = "sliding_attention", "full_attention"
_CAUSAL = ("causal", "is_causal", "causal_head")
_SINKS = ("attention_sink_bias", "add_swa_attention_sink_bias")
#: False: RoPE turns pairs of neighbours, not of the two halves of a head.
NEOX = ("is_neox_style", "rope_is_neox_style")
#: Keys that the functions here read.
ATTENTION = frozenset({
    "layer_types", "sliding_window", "use_sliding_window", "use_swa", "swa_window_size", *NEOX, *_CAUSAL,
    *_SINKS,
})  # fmt: skip


def read_attention(config: HFConfig, dflash: HFConfig, num_layers: int) -> dict[str, Any]:
    """Fields of `BodyConfig` from a config of the DFlash layout; raises `CheckpointError` naming file and key."""
    windows, forced = _windows(config, num_layers), _forced_window(config, dflash)
    stated = _stated_causality(config, dflash)
    causal = tuple(window is not None for window in windows) if stated is None else (stated,) * num_layers
    if forced is not None:
        windows = (forced,) * num_layers
    _refuse_interleaved(config, dflash)
    return _fields(windows, causal, _sinks(config, dflash, windows))


def read_speculators_attention(config: HFConfig, nested: HFConfig, num_layers: int, *, ahead: bool) -> dict[str, Any]:
    """The same from a config of speculators and the model nested in it; `ahead` is the default of the key that says
    whether layers with a window are not causal.
    """
    for part in (config, nested):
        for key in (*_CAUSAL, *_SINKS):
            part.only(key, None, False)
        _refuse_interleaved(part)
    windows = _windows(nested, num_layers)
    are_causal = not config.get("sliding_window_non_causal", bool, ahead)
    causal = tuple(window is not None and are_causal for window in windows)
    return _fields(windows, causal, sinks=False)


def _fields(windows: tuple[int | None, ...], causal: tuple[bool, ...], sinks: bool) -> dict[str, Any]:
    return {"windows": windows if any(windows) else (), "causal": causal if any(causal) else (), "sinks": sinks}


def _windows(config: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer by layer_types and sliding_window."""
    types, used = (
        config.layer_types(num_layers, (_FULL, _SLIDING), [_FULL] * num_layers),
        config.values.get("use_sliding_window"),
    )
    window = config.optional_size("sliding_window")
    if _SLIDING in types:
        if used is False:
            expected = f"true, because layer_types has a layer of {_SLIDING}"
            raise config.refuse("use_sliding_window contradicts layer_types.", "use_sliding_window", expected)
        if window is None:
            raise config.refuse("The width of the window is missing.", "sliding_window", "a number of tokens")
        return tuple(window if kind == _SLIDING else None for kind in types)
    stated = config.values.get("layer_types") is not None
    if used is True or (window is not None and used is None and not stated):
        what = "The config has a window, and says of no layer that it has one."
        fix = f"list the layers in layer_types, with {_SLIDING} for those that were trained with the window"
        raise config.refuse(what, "use_sliding_window" if used else "sliding_window", "no window", fix)
    return (None,) * num_layers


def _forced_window(config: HFConfig, dflash: HFConfig) -> int | None:
    """The window of all layers, whatever layer_types says."""
    size = dflash.optional_size("swa_window_size")
    if not dflash.get("use_swa", bool, False):
        if size is not None and dflash.values.get("use_swa") is None:
            what = "A window is given, and not whether it is used."
            raise dflash.refuse(what, "swa_window_size", "use_swa, or no window")
        return None
    written = config.optional_size("sliding_window")
    if size is None and written is None:
        raise dflash.refuse("The width of the window is missing.", "swa_window_size", "a number of tokens")
    if None not in (size, written) and size != written:
        raise dflash.refuse("The window is given twice, with different values.", "swa_window_size", written)
    return size or written


def _stated_causality(config: HFConfig, dflash: HFConfig) -> bool | None:
    """Whether a config makes all layers causal; None: it does not say."""
    stated = [(part, key) for part in (config, dflash) for key in _CAUSAL if part.values.get(key) is not None]
    found = [(part, key, part.get(key, bool)) for part, key in stated]
    said = [one for one in found if one[1] != "causal_head" or one[2]]  # of one that is false others say nothing
    for part, key, value in said[1:]:
        if value != said[0][2]:
            expected = f"{str(said[0][2]).lower()}, as {said[0][1]} says"
            raise part.refuse("The config says twice, and differently, whether a block is causal.", key, expected)
    return said[0][2] if said else (False if found else None)


def _sinks(config: HFConfig, dflash: HFConfig, windows: tuple[int | None, ...]) -> bool:
    on = [(part, key) for part in (config, dflash) for key in _SINKS if part.get(key, bool, False)]
    if on and all(key == _SINKS[1] for _, key in on) and None in windows:
        part, key = on[0]
        what = "Only layers with a window have sinks, and some have none; d2sd runs sinks in all layers, or none."
        raise part.refuse(what, key, "a window for every layer")
    return bool(on)


def _refuse_interleaved(*parts: HFConfig) -> None:
    for part in parts:
        for key in NEOX:
            if not part.get(key, bool, True):
                what = "RoPE turns pairs of neighbours, which d2sd does not run: it turns the two halves of a head."
                raise part.refuse(what, key, "true", "put the heads in that order: d2sd convert --to z-lab")


def check_windows(config: HFConfig, body: BodyConfig, block_size: int) -> None:
    """Refuse a window that is smaller than a block whose rows see what is behind them: readers differ in what those
    see.
    """
    for window, causal in body.views:
        if window is not None and not causal and window < block_size:
            raise CheckpointError(
                "The window is smaller than a block.",
                where=f"{config.where}: sliding_window",
                found=window,
                expected=f"{block_size} or more",
            )


def layer_fields(body: BodyConfig) -> dict[str, object]:
    """layer_types and the window, as both formats write them."""
    widths = {window for window in body.windows if window is not None}
    assert len(widths) <= 1, "the formats have one width"
    windows = body.windows or (None,) * body.num_layers
    return {
        "layer_types": [_FULL if window is None else _SLIDING for window in windows],
        "sliding_window": next(iter(widths), None),
        "use_sliding_window": bool(widths),
    }


def causality(body: BodyConfig) -> bool | None:
    """Whether all layers are causal; None: those with a window are, the others are not."""
    causal = {causal for _, causal in body.views}
    if len(causal) == 1:
        return causal.pop()
    assert all(causal == (window is not None) for window, causal in body.views), "the layout has no key for each layer"
    return None


#: Keys that `read_body` reads.
READ = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "attention_bias",
    "vocab_size", "hidden_act", "model_type",
})  # fmt: skip
#: Keys that do not affect the forward pass.
INERT = frozenset({
    "auto_map", "attention_dropout", "initializer_range", "use_cache", "max_window_layers", "tie_word_embeddings",
    "dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path",
})  # fmt: skip


def read_body(config: HFConfig) -> BodyConfig:
    """Read the body but what its layers see (`read_attention`); raises `CheckpointError` naming file and key."""
    num_layers, heads = config.layers("num_hidden_layers"), config.size("num_attention_heads")
    config.only("model_type", "qwen3")  # the body's shape, whatever the target's family
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)  # transformers' default of Qwen3
    return BodyConfig(
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads"),
        head_dim=config.size("head_dim", limit=MAX_SIZE // heads),
        rms_norm_eps=config.get("rms_norm_eps", float),
        rope=config.rope(),
        max_positions=config.size("max_position_embeddings"),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )


def body_fields(body: BodyConfig) -> dict[str, object]:
    """Every field of a DFlash drafter's body except RoPE, which the formats spell differently."""
    assert body.qk_norm, "no layout can represent a drafter without q/k norms"
    assert body.qkv_bias == body.o_bias, "the layouts have one attention_bias for q, k, v and o"
    return {
        **geometry_fields(body),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_window_layers": body.num_layers,
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "use_cache": True,
        **layer_fields(body),
    }


def geometry_fields(body: BodyConfig) -> dict[str, object]:
    """The fields that configs of all kinds of drafters share."""
    return {
        "attention_bias": body.o_bias,
        "head_dim": body.head_dim,
        "hidden_act": "silu",
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "max_position_embeddings": body.max_positions,
        "num_attention_heads": body.num_heads,
        "num_hidden_layers": body.num_layers,
        "num_key_value_heads": body.num_kv_heads,
        "rms_norm_eps": body.rms_norm_eps,
    }


def from_hidden_states(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids of hidden states -> ids of `DrafterConfig`."""
    return tuple(i - 1 for i in ids)


def to_hidden_states(ids: Sequence[int]) -> list[int]:
    """Ids of `DrafterConfig` -> ids of hidden states."""
    return [i + 1 for i in ids]


def fault(ids: Sequence[int], num_target_layers: int) -> str | None:
    """Describe valid ids if these ids of `DrafterConfig` are invalid; None if they are valid, in any order."""
    if ids and len(set(ids)) == len(ids) and min(ids) >= 0 and max(ids) < num_target_layers:
        return None
    return f"ids of different layers, 0 to {num_target_layers - 1}"


def usual_ids(num_layers: int, num_target_layers: int) -> list[int]:
    """Defaults of z-lab and SGLang for a config without ids: evenly spaced from layer 1 to L - 3.

    Only for messages: a drafter trained with other ids would run with these and almost never be accepted.
    """
    if num_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 3 - 1) / (num_layers - 1)
    return [round(1 + index * step) for index in range(num_layers)]


def sort_columns(fc: Tensor, ids: Sequence[int]) -> Tensor:
    """fc [E, n·E], whose n column blocks follow `ids`, with the blocks in ascending order of the ids."""
    import torch

    order = sorted(range(len(ids)), key=lambda index: ids[index])
    blocks = fc.chunk(len(ids), dim=1)
    return torch.cat([blocks[index] for index in order], dim=1)


#: Values of `training_mode`, or of `loss_type` without it. D-PACE is a weighting of the first drafter's loss.
ROLES: dict[str, Role] = {
    "dflash": "first",
    "dpace": "first",
    "dpace-cumulative-confidence-only": "first",
    "dpace-continuation-value-only": "first",
    "vp_drafter": "variable_prefix",
}
#: Keys of `dflash_config` that training writes.
TRAINING = frozenset({"training_mode", "loss_type", "prefix_weight_base"})


def read_role(dflash: HFConfig, declared: Role | None) -> tuple[Role, float | None]:
    """Role and prefix weight base of a `dflash_config`; raises `CheckpointError` if they contradict each other."""
    key = "training_mode" if dflash.values.get("training_mode") is not None else "loss_type"
    mode = dflash.get(key, str, "")
    if mode and mode not in ROLES:
        raise dflash.refuse("This kind of drafter is not supported.", key, " or ".join(ROLES))
    role = ROLES.get(mode, declared or "first")
    if declared not in (None, role):
        raise dflash.refuse("The declared role contradicts the config.", key, f"no {key}, or {declared}")
    if dflash.values.get("prefix_weight_base") is None:
        return role, None
    if role == "first":
        raise dflash.refuse(
            "prefix_weight_base is set, but this is not a variable-prefix drafter.",
            "prefix_weight_base",
            "null, or training_mode vp_drafter",
            fix="declare it: --role variable_prefix",
        )
    return role, dflash.get("prefix_weight_base", float)


def misfit(
    what: str, folder: Path, key: str, found: object, expected: object, fix: str | None = None
) -> CheckpointError:
    """An error of a drafter whose config does not fit what it is to run with."""
    return CheckpointError(what, where=f"{folder / 'config.json'}: {key}", found=found, expected=expected, fix=fix)


_FIX = "use a drafter that was trained for this target"


def check_geometry(
    pairs: Iterable[tuple[str, object, object]], config: DraftConfig, target: DecoderConfig, where: Path
) -> None:
    """Refuse a drafter of another target: where a key's value, in `pairs`, is not the target's, or the positions."""
    for key, found, expected in pairs:
        if found != expected:
            raise misfit("The drafter was made for another target.", where, key, found, expected, _FIX)
    _check_rope(config.body.rope, target.body.rope, where)


def _check_rope(found: RopeConfig, expected: RopeConfig, where: Path) -> None:
    """Refuse positions other than the target's: the drafter reads the target's features at them."""
    if rope_fields(found) == rope_fields(expected):  # what a kind does not use does not count
        return
    fix = _FIX
    if expected.kind == "yarn" and found == RopeConfig(theta=expected.theta):
        longest = f"{expected.original_max_positions:,} tokens"
        fix = (
            f"remove the scaling from the target's config.json, and serve contexts of up to {longest}; or train with it"
        )
    what, key = "The drafter was made for another target: its positions (RoPE) differ.", "rope_theta and rope_scaling"
    raise misfit(what, where, key, json.dumps(rope_fields(found)), json.dumps(rope_fields(expected)), fix)


def refuse_fp8(directory: Path, config: HFConfig, layers: Iterable[str], what: str, *, expected: str, fix: str) -> None:
    """Refuse a drafter with FP8 in one of `layers`, or of K/V."""
    quantization = read_drafter_quantization(directory, config)
    narrow = quantization.of(layers) if quantization else []
    if narrow or (quantization and quantization.kv):
        raise CheckpointError(
            what, where=f"{directory}: {FILE} or {KEY}", found=", ".join(narrow) or "K/V", expected=expected, fix=fix
        )
