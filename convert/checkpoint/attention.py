"""How the rows of a drafter's block attend, layer by layer: windows, causality inside the block, sinks.

    window      layer_types says which layers have one, sliding_window how wide it is, the row itself included
                use_swa and swa_window_size in dflash_config: every layer has one, whatever layer_types says (ModelOpt)
    causality   is_causal at the top level, causal, is_causal or causal_head (JetSpec) in dflash_config: of all layers
                none of them: a layer is causal if layer_types makes it a sliding one, as vLLM runs z-lab's drafters
                speculators: sliding_window_non_causal, of layers with a window; others are never causal
    sinks       attention_sink_bias; add_swa_attention_sink_bias, of layers with a window

Readers differ in which key wins where two disagree, so a config that says two things is refused.
"""

from __future__ import annotations

from typing import Any

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.errors import CheckpointError
from d2sd.modeling.config import BodyConfig

_SLIDING, _FULL = "sliding_attention", "full_attention"
_CAUSAL = ("causal", "is_causal", "causal_head")
_SINKS = ("attention_sink_bias", "add_swa_attention_sink_bias")
#: False: RoPE turns pairs of neighbours, not of the two halves of a head.
NEOX = ("is_neox_style", "rope_is_neox_style")
#: Keys that the functions here read.
KEYS = frozenset({
    "layer_types", "sliding_window", "use_sliding_window", "use_swa", "swa_window_size", *NEOX, *_CAUSAL,
    *_SINKS,
})  # fmt: skip


def read_attention(config: HFConfig, dflash: HFConfig, num_layers: int) -> dict[str, Any]:
    """Fields of `BodyConfig` from a config of the DFlash layout; raises `CheckpointError` naming file and key."""
    sliding, windows = _types(config, num_layers), _windows(config, num_layers)
    if (forced := _forced_window(config, dflash)) is not None:
        windows = (forced,) * num_layers
    stated = _stated_causality(config, dflash)
    causal = sliding if stated is None else (stated,) * num_layers
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


def _types(config: HFConfig, num_layers: int) -> tuple[bool, ...]:
    """Whether layer_types says that a layer has a window."""
    return tuple(kind == _SLIDING for kind in config.layer_types([_FULL] * num_layers, _FULL, _SLIDING))


def _windows(config: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer by layer_types and sliding_window."""
    sliding, used = _types(config, num_layers), config.values.get("use_sliding_window")
    window = None if config.values.get("sliding_window") is None else config.size("sliding_window")
    if any(sliding):
        if used is False:
            expected = f"true, because layer_types has a layer of {_SLIDING}"
            raise config.refuse("use_sliding_window contradicts layer_types.", "use_sliding_window", expected)
        if window is None:
            raise config.refuse("The width of the window is missing.", "sliding_window", "a number of tokens")
        return tuple(window if one else None for one in sliding)
    stated = config.values.get("layer_types") is not None
    if used is True or (window is not None and used is None and not stated):
        what = "The config has a window, and says of no layer that it has one."
        fix = f"list the layers in layer_types, with {_SLIDING} for those that were trained with the window"
        raise config.refuse(what, "use_sliding_window" if used else "sliding_window", "no window", fix)
    return (None,) * num_layers


def _forced_window(config: HFConfig, dflash: HFConfig) -> int | None:
    """The window of all layers, whatever layer_types says."""
    size = None if dflash.values.get("swa_window_size") is None else dflash.size("swa_window_size")
    if not dflash.get("use_swa", bool, False):
        if size is not None and dflash.values.get("use_swa") is None:
            raise dflash.refuse(
                "A window is given, and not whether it is used.", "swa_window_size", "use_swa, or no window"
            )
        return None
    written = None if config.values.get("sliding_window") is None else config.size("sliding_window")
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
