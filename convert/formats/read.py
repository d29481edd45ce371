"""Reads any format into the canonical drafter: unknown and missing keys and tensors are refused.

    speculators    speculators_model_type: dflash, dspark or dflash2
    DeepSpec       the architecture Qwen3DSparkModel, also of plain DFlash drafters (markov_rank 0); written as
                   SpecForge writes such drafters, without copies of the target's tensors
    DFlash         dflash_config, or an architecture of `checkpoint/heads.py`: z-lab's, ModelOpt's and SpecForge's

The format is detected from `config.json` alone. One reader reads all dialects of the DFlash layout
(`kinds/dflash.py`); `checkpoint/unsupported.py` lists models that are recognised and refused. ModelOpt's Domino,
DSpark and windowed exports keep DFlash's architecture name and differ only in their keys.

A canonical drafter's `config` and `tensors` are the complete model: nothing else affects its outputs. Fields of the
original config.json that d2sd does not model (auto_map, bos ids) are not kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from d2sd.convert.checkpoint import heads
from d2sd.convert.checkpoint.attention import NEOX
from d2sd.convert.checkpoint.dspark import DEEPSPEC, DSPARK
from d2sd.convert.checkpoint.headers import INDEX, TensorInfo, read_headers
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.layout import sort_columns
from d2sd.convert.checkpoint.own_files import DRAFT_VOCABULARY, read_draft_vocabulary
from d2sd.convert.checkpoint.unsupported import refuse_tensors, refuse_unsupported
from d2sd.convert.checkpoint.weights import read_tensors
from d2sd.convert.formats import speculators
from d2sd.convert.formats.shared_tensors import EMBEDDING, HEAD, TargetParts
from d2sd.convert.formats.speculators import EXTRA, read_extra
from d2sd.convert.kinds import DFLASH
from d2sd.convert.kinds.dflash import check_target, has_mask_embedding, read_layout
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DrafterConfig, Role

Format = Literal["DFlash", "DeepSpec", "speculators"]
#: Tensors that formats add to a drafter's own.
_EXTRA: dict[Format, tuple[str, ...]] = {"DFlash": (), "DeepSpec": (EMBEDDING, HEAD), "speculators": EXTRA}


@dataclass(frozen=True, slots=True)
class CanonicalDrafter:
    """A drafter of any format."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]  # `Drafter.state_dict()`, in the one dtype in which they are stored
    format: Format
    folder: Path
    notes: tuple[str, ...] = ()  # for the user: what was dropped unchecked, reordered or declared

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["fc.weight"].dtype


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_drafter(folder: Path, target: TargetParts | None = None, declared: Role | None = None) -> CanonicalDrafter:
    """Read a checkpoint of any format; raises `CheckpointError` naming file and key or tensor.

    With a `target` the drafter is checked against it. `declared` is the role of a drafter whose config has none.
    """
    raw = HFConfig.read(folder)
    form = detect(raw)
    raw, is_interleaved = (raw, False) if form == "speculators" else _without_pairs(raw)
    _check_files(folder)
    config = read_config(raw, form, target.config.body.num_layers if target else None, declared)
    config = replace(config, mask_embedding=has_mask_embedding(folder))
    headers = read_headers(folder)
    refuse_tensors(headers)
    extra = {name: headers[name] for name in _EXTRA[form] if name in headers}
    # required of speculators, whose reader has a default of 32000
    size = raw.size("draft_vocab_size") if form == "speculators" else config.vocab_size
    tensors = _body_tensors(folder, config, headers, extra, size)
    notes = _declaration(raw, form, config, declared)
    if is_interleaved:
        tensors |= _in_halves(tensors, config.body.head_dim)
        notes.append("RoPE turns pairs of neighbours: queries and keys are put in the order of halves of a head")
    if form == "DFlash":
        config = replace(
            config, draft_vocabulary=read_draft_vocabulary(folder, config.vocab_size, config.mask_token_id)
        )
    else:
        ids, more = read_extra(config, size, extra, target, tensors["fc.weight"].dtype, raw.where)
        config = replace(config, draft_vocabulary=ids)
        tensors |= heads.all_rows(config, tensors)
        notes += more
    ids = config.target_layer_ids
    if list(ids) != sorted(ids):
        config = replace(config, target_layer_ids=tuple(sorted(ids)))
        tensors["fc.weight"] = sort_columns(tensors["fc.weight"], ids)
        notes.append(f"layer ids {list(ids)} and the columns of fc.weight with them are put in ascending order")
    if target is not None:
        check_target(config, target.config, folder)
    return CanonicalDrafter(config, tensors, form, folder, (*notes, *_unread_files(folder, headers)))


def read_config(raw: HFConfig, form: Format, num_target_layers: int | None, declared: Role | None) -> DrafterConfig:
    """Read a config of `form`, layer ids in the file's order, without the draft vocabulary."""
    if form == "speculators":
        return speculators.read_speculators(raw, num_target_layers, declared)
    return (_read_deepspec if form == "DeepSpec" else read_layout)(raw, declared)


def _without_pairs(raw: HFConfig) -> tuple[HFConfig, bool]:
    """The config without the keys that say how RoPE pairs the numbers of a head, and whether it pairs neighbours."""
    part = raw.values.get("dflash_config")
    parts = [raw, *([raw.part("dflash_config")] if isinstance(part, dict) else [])]
    is_interleaved = not all(one.get(key, bool, True) for one in parts for key in NEOX)
    if not is_interleaved:
        return raw, False
    top, *inner = ({key: value for key, value in one.values.items() if key not in NEOX} for one in parts)
    return HFConfig(top | ({"dflash_config": inner[0]} if inner else {}), raw.where), True


def _in_halves(tensors: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Queries and keys in which the halves of a head of `size` are what were the first and second of each pair.

    Their dot products stay the same, and so does all that follows.
    """
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    names = [name for name in tensors if re.search(r"\.self_attn\.[qk]_(proj|norm)\.", name)]
    return {name: tensors[name].view(-1, size, *tensors[name].shape[1:])[:, order].flatten(0, 1) for name in names}


_DEEPSPEC = DSPARK.keys | {"mask_token_id", "target_layer_ids"}
#: Keys of training, or of the target's own config.
_UNUSED = {"num_anchors", "architectures", "_attn_implementation", "attn_implementation"}


def _read_deepspec(config: HFConfig, declared: Role | None = None) -> DrafterConfig:
    """Read DeepSpec's config, a copy of the target's with the drafter's keys among them, layer ids in the file's order.

    Layer id -1, the embedding's output, is not supported. The anchor's row proposes: a block of B drafts B tokens.
    Raises `CheckpointError` naming file and key.
    """
    own = {key: value for key, value in config.values.items() if key in _DEEPSPEC}
    rest = {key: value for key, value in config.values.items() if key not in _DEEPSPEC | _UNUSED}
    return read_layout(
        HFConfig(rest, config.where), declared, HFConfig(own | {"sample_from_anchor": True}, config.where)
    )


def _check_files(folder: Path) -> None:
    """Refuse files next to the config that change what the weights mean."""
    for name in QUANTIZED:
        if (folder / name).exists():
            raise CheckpointError(
                "This is a quantized checkpoint, which d2sd does not convert.",
                where=folder / name,
                fix="convert the checkpoint from before it was quantized",
            )


def _body_tensors(
    folder: Path, config: DrafterConfig, headers: Mapping[str, TensorInfo], extra: Mapping[str, TensorInfo], size: int
) -> dict[str, Tensor]:
    """The drafter's own tensors, in one type; those with a row for each token have `size` of them."""
    free = set(extra) - {EMBEDDING, HEAD} | heads.LOOSE.keys()
    dtypes = {info.dtype for name, info in headers.items() if name not in free}
    dtype = _DTYPES.get(min(dtypes, default="F32"), torch.float32)  # other types are refused by name below
    tensors: dict[str, Tensor] = {}
    shapes = DFLASH.shapes(config)
    shapes |= {name: (size, *shapes[name][1:]) for name in heads.token_rows(config)}
    for _, part in read_tensors(folder, shapes, dtype, lambda name: None if name in extra else DFLASH.our_name(name)):
        tensors |= part
    if len(dtypes) > 1:
        raise CheckpointError(
            "The tensors have different types.", where=folder, found=", ".join(sorted(dtypes)), expected="one type"
        )
    return tensors


def _declaration(raw: HFConfig, form: Format, config: DrafterConfig, declared: Role | None) -> list[str]:
    section = raw.values.get("d2sd" if form == "speculators" else "dflash_config") or {}
    silent = not any(section.get(key) for key in ("training_mode", "loss_type"))
    return [f"the role {config.role} is declared, not read: the config has no role"] if declared and silent else []


def _unread_files(folder: Path, headers: Mapping[str, TensorInfo]) -> list[str]:
    """Name the files that are not read: code is never run or copied, pickles are never opened."""
    read = {info.file.name for info in headers.values()} | {"config.json", DRAFT_VOCABULARY, INDEX}
    others = sorted(p.name for p in folder.iterdir() if p.name not in read and not p.name.startswith("."))
    pickles = [name for name in others if name in PICKLES]
    notes = [f"not converted: {', '.join(others)}"] if others else []
    return notes + [f"{name} is a pickle and was not opened: its training settings are unknown" for name in pickles]


#: Files next to the weights that mark a quantized checkpoint (ModelOpt's export and its older names), which is refused.
QUANTIZED = ("hf_quant_config.json", "quantize_config.json", "quant_cfg.json")
#: Files of SpecForge's training next to the weights; pickles, so never opened.
PICKLES = ("training_state.pt",)


def detect(config: HFConfig) -> Format:
    """Return the format. Raises `CheckpointError` for an unsupported model and for an unknown format."""
    refuse_unsupported(config)
    values = config.values
    if (kind := values.get("speculators_model_type")) is not None:
        if kind not in speculators.KINDS:
            expected = " or ".join(speculators.KINDS)
            raise config.refuse("This kind of speculator is not supported.", "speculators_model_type", expected)
        return "speculators"
    architectures = values.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if names == [DEEPSPEC]:
        return "DeepSpec"
    if "dflash_config" in values or (len(names) == 1 and names[0] in heads.ARCHITECTURES):
        return "DFlash"
    seen = {key: values[key] for key in ("architectures", "model_type") if key in values}
    raise CheckpointError(
        "The drafter's format is not recognised.",
        where=config.where,
        found=f"{json.dumps(seen)[1:-1] or 'none of the known keys'}; no dflash_config, no speculators_model_type",
        expected="z-lab, ModelOpt or SpecForge (dflash_config), DeepSpec (architecture Qwen3DSparkModel), or "
        "speculators (speculators_model_type)",
    )
