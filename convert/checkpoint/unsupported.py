"""Models that resemble a DFlash drafter: recognised by their config and refused by name where one is read.

Most of them would load as plain DFlash, run, and almost never be accepted; one would attend to tokens outside
its mask. FlexDraft and EAGLE-3 heads are kinds of their own (`d2sd.convert.kinds`), which recipes name as they are. A
key that marks a model is harmless with the values listed for it, and then every reader accepts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from d2sd.convert.checkpoint.headers import TensorInfo
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.errors import CheckpointError

_OFF = (None, False)
_NOTHING = (None, 0)


@dataclass(frozen=True, slots=True)
class Kind:
    """One other model."""

    name: str
    reason: str
    architectures: tuple[str, ...] = ()
    keys: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # key -> values that do not mark this kind
    fix: str | None = None
    run: str = "run"  # what d2sd does not do with it


_CHOOSE = "choose a DFlash, DFlash 2, DSpark or DSpine drafter of the same target"
#: The first match is reported, so specific kinds come before general ones.
_KINDS = (
    Kind(
        "quantized checkpoint", "quantized weights and scales are not supported here", (),
        {"quantization_config": (None,)}, "convert the checkpoint from before it was quantized",
    ),
    Kind(
        "Domino drafter", "it has a recurrent correction head", ("DominoDraftModel",),
        dict.fromkeys(("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"), _NOTHING), _CHOOSE,
    ),
    Kind(
        "FlexDraft drafter", "its layer ids are layers of the target that draft, not features that a drafter reads", (),
        {"flexdraft_config": (None,), "enable_anchor_bias_logits": _OFF, "anchor_bias_rank": _NOTHING},
        "name it as drafters.first in a recipe", "run as a DFlash drafter",
    ),
    Kind(
        "EAGLE-3 drafter", "it drafts one token after another",
        ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "EAGLE3LlamaForCausalLM", "Eagle3Speculator"),
        {"eagle_config": (None,)},
        "name it as drafters.first in a recipe, in the layout of SpecForge, EAGLE or ModelOpt",
        "run as a DFlash drafter",
    ),
    Kind("Laguna drafter", "its projections are fused, and gated", ("DFlashLagunaForCausalLM",)),
    Kind(
        "TensorRT Edge-LLM export", "it is a graph, not a checkpoint", (),
        {"spec_decode_type": (None,), "engine_role": (None,)}, "convert the checkpoint it was exported from",
    ),
    Kind(
        "TensorRT-LLM checkpoint", "that layout, of 1.2.1 and older, has no DFlash drafters", (), {"mapping": (None,)},
        "convert the Hugging Face checkpoint it was made from",
    ),
    Kind(
        "drafter with a projector", "its head is not only the target's", (),
        {"projector_type": (None, "none", "dspark", "d2sd_pair")}, _CHOOSE,  # the last is read by `heads.py`
    ),
    Kind(
        "drafter with another attention", "d2sd runs plain grouped-query attention", (),
        {"attention_value_scale": (None, 1.0), "attention_mode": (None, "gqa")},
    ),
    Kind(
        "drafter with altered logits", "d2sd uses the output of the target's head unchanged", (),
        {"output_multiplier": (None, 1.0)},
    ),
    Kind(
        "drafter with scaled embeddings", "d2sd uses the target's embedding unchanged", (),
        {"input_embedding_scale": (None, 1.0)},
    ),
    Kind(
        "drafter without target features", "a DFlash drafter reads the target's layers", (),
        {"use_aux_hidden_state": (None, True)},
    ),
)  # fmt: skip
#: Keys that may appear anywhere in a config, because `refuse_unsupported` has checked their values.
KEYS = frozenset(key for kind in _KINDS for key in kind.keys)
#: Beginnings of tensors' names that mark another model, where no key of its config is known.
_TENSORS = dict.fromkeys(
    ("mode_embed", "mode_gate"),
    Kind("multi-future drafter (MFD)", "it drafts in several modes at once, and how is not published", fix=_CHOOSE),
)


def refuse_unsupported(config: HFConfig) -> None:
    """Raise `CheckpointError` naming model, file and key if d2sd does not run the model of `config`."""
    names: Any = config.values.get("architectures")
    inner = ("dflash_config", "transformer_layer_config")
    parts = [config, *(config.part(key) for key in inner if isinstance(config.values.get(key), dict))]
    for kind in _KINDS:
        marks = [(part, key) for part in parts for key, plain in kind.keys.items() if part.values.get(key) not in plain]
        if isinstance(names, list) and any(name in kind.architectures for name in names):
            marks.insert(0, (config, "architectures"))
        if marks:
            part, key = marks[0]
            raise part.refuse(_what(kind), key, "a plain DFlash drafter", kind.fix)


def refuse_tensors(headers: Mapping[str, TensorInfo]) -> None:
    """Raise `CheckpointError` naming model, file and tensor if d2sd does not run the model of these tensors."""
    for name, info in headers.items():
        for beginning, kind in _TENSORS.items():
            if name.startswith(beginning):
                where = f"{info.file}: {name}"
                raise CheckpointError(_what(kind), where=where, expected="a plain DFlash drafter", fix=kind.fix)


def _what(kind: Kind) -> str:
    article = "an" if kind.name[0] in "AEIOU" else "a"
    return f"This is {article} {kind.name}, which d2sd does not {kind.run}: {kind.reason}."
