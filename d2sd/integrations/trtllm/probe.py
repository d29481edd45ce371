"""Compares the installed TensorRT-LLM with the parts of it that we use: one row per dependency.

The contract lists them as they are in its sources: names, parameters, enum members, words in function bodies. The
commits are those of the files that were read, one per file; the sources do not name a release.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

#: The range of package versions that these sources belong to. Other versions are not patched.
VERSIONS = ">=1.3.0rc22,<=1.4.0rc1"

_DFLASH = "tensorrt_llm._torch.speculative.dflash"
_INTERFACE = "tensorrt_llm._torch.speculative.interface"
_UTILS = "tensorrt_llm._torch.speculative.utils"
_MODEL = "tensorrt_llm._torch.models.modeling_dflash"
_REGISTRY = "tensorrt_llm._torch.models.modeling_utils"

COMMITS = {
    _DFLASH: "00679c66c3e38f6d2651ad0a5bef0f94d862e36c",
    _INTERFACE: "00b6d5a25c30b4382d24fbdf52956d601b3ffd24",
    _UTILS: "011d0933dcb5e592f5fa2626beaf42a96324c578",
    _MODEL: "009d8fa431bd3de92245aab80f8b57dc70da1ac4",
    _REGISTRY: "a commit not recorded",  # read in a version that has SPEC_MODE_TO_MODULE
}


@dataclass(frozen=True, slots=True)
class Need:
    """One dependency: `name` in `module`, dotted for attributes."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None  # names in order, `self` included; None: not compared
    mentions: tuple[str, ...] = ()  # words that the function's source must contain
    same_as: tuple[str, str] | None = None  # module and name that must be the same object


_INPUTS = (
    "noise_embedding",
    "query_positions",
    "num_ctx_per_req",
    "ctx_k_cache",
    "ctx_v_cache",
    "ctx_cache_batch_idx",
    "first_prev_tokens",
)
_FORWARD = (*_INPUTS[:-1], "ctx_kv_cache", "ctx_page_table")
_PREPARE = (
    "self",
    "input_ids",
    "position_ids",
    "hidden_states",
    "accepted_tokens",
    "num_accepted_tokens",
    "attn_metadata",
    "spec_metadata",
    "draft_model",
    "total_target_tokens",
)

NEEDS = (
    Need(_INTERFACE, "SpeculativeDecodingMode.DFLASH"),
    Need(_REGISTRY, "register_draft_model", ("mode",)),
    Need(_REGISTRY, "get_registered_draft_model_builder", ("mode",)),
    Need(_MODEL, "_build_dflash_draft", ("model_config", "draft_config", "lm_head", "model")),
    Need(_MODEL, "DFlashForCausalLM.__init__", ("self", "draft_config", "dflash_attention_backend")),
    Need(_MODEL, "DFlashForCausalLM.project_target_hidden", ("self", "hidden_states")),
    Need(
        _MODEL,
        "DFlashForCausalLM.precompute_context_kv",
        ("self", "projected_hidden", "positions"),
        mentions=("_num_attn_layers",),
    ),
    Need(_MODEL, "DFlashForCausalLM._build_fused_kv_buffers", ("self",), mentions=("_num_attn_layers",)),
    Need(_MODEL, "DFlashForCausalLM.dflash_forward", ("self", *_FORWARD)),
    Need(_MODEL, "DFlashForCausalLM.load_weights", ("self", "weights", "weight_mapper", "kwargs")),
    Need(_MODEL, "DFlashForCausalLM.load_weights_from_target_model", ("self", "target_model")),
    Need(
        _DFLASH,
        "DFlashWorker._lazy_init_ctx_buffers",
        mentions=("_build_fused_kv_buffers", "_num_attn_layers", "_num_kv_heads", "_head_dim"),
    ),
    Need(_DFLASH, "DFlashWorker._forward_impl", mentions=("prepare_1st_drafter_inputs", "_refine_block_logits")),
    Need(_DFLASH, "DFlashWorker.prepare_1st_drafter_inputs", _PREPARE, mentions=_INPUTS),
    Need(
        _DFLASH, "DFlashWorker._draft_slot_ids", ("self", "draft_model", "num_gens", "block_size", "num_draft_tokens")
    ),
    Need(
        _DFLASH, "DFlashWorker._refine_block_logits", ("self", "draft_model", "gen_logits", "inputs", "spec_metadata")
    ),
    Need(
        _UTILS,
        "get_spec_worker",
        ("spec_config", "model_config", "mapping", "use_separate_draft_kv_cache"),
        mentions=("DFlashWorker",),
    ),
    Need(_UTILS, "DFlashWorker", same_as=(_DFLASH, "DFlashWorker")),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `found` describes the mismatch, or the installed object."""

    need: str
    expected: str
    found: str
    good: bool


def probe() -> list[Row]:
    """Import what the contract names and compare; the version comes first. Never raises for a mismatch."""
    try:
        package = importlib.import_module("tensorrt_llm")
    except Exception as error:  # a broken CUDA library can raise anything
        return [Row("tensorrt_llm", VERSIONS, f"cannot be imported: {_brief(error)}", False)]
    return [_version(str(getattr(package, "__version__", "no version"))), *map(_row, NEEDS)]


def failures(rows: list[Row]) -> list[str]:
    """The mismatches, one short text each; empty if the contract is met."""
    return [f"{row.need}: {row.found}" for row in rows if not row.good]


def _version(version: str) -> Row:
    try:
        good = SpecifierSet(VERSIONS, prereleases=True).contains(Version(version))
    except InvalidVersion:
        good = False
    return Row("tensorrt_llm", VERSIONS, version if good else f"{version}, a version whose sources were not read", good)


def _row(need: Need) -> Row:
    label = f"{need.module.removeprefix('tensorrt_llm._torch.')}: {need.name}"
    if need.parameters is not None:
        expected = f"({', '.join(need.parameters)})"
    else:
        expected = f"is {need.same_as[1]} of {need.same_as[0].rsplit('.', 1)[-1]}" if need.same_as else "is there"
    try:
        complaint = _complaint(need, _resolve(need.module, need.name))
    except Exception as error:  # import errors of any kind, missing attributes, objects without a signature
        complaint = _brief(error)
    return Row(label, expected, complaint or "as read", not complaint)


def _complaint(need: Need, value: Any) -> str:
    """The mismatch of an object that exists; empty if it matches."""
    if need.parameters is not None:
        parameters = tuple(inspect.signature(value).parameters)
        if parameters != need.parameters:
            return f"({', '.join(parameters)})"
    if need.mentions:
        text = inspect.getsource(value)
        missing = [word for word in need.mentions if word not in text]
        if missing:
            return f"no longer mentions {', '.join(missing)}"
    if need.same_as is not None and value is not _resolve(*need.same_as):
        return "another object"
    return ""


def _resolve(module: str, name: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _brief(error: Exception) -> str:
    """One line of an exception."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
