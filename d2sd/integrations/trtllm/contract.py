"""The parts of TensorRT-LLM that the tree uses, and the comparison of the installed version with them.

Sources do not name a release: each file was read at the commit behind its name, where that was recorded. What they do
not show, types and sizes of tensors, is compared at the first step (`tree_worker.check_step`).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

#: The window of package versions that is patched. Earlier ones pin a Triton that miscompiles our attention on Hopper.
VERSIONS = ">=1.3.0rc27,<=1.4.0rc1"

_PACKAGE = "tensorrt_llm._torch"
_INTERFACE = (f"{_PACKAGE}.speculative.interface",)  # 00b6d5a2
_UTILS = (f"{_PACKAGE}.speculative.utils",)  # 011d0933
_EAGLE = (f"{_PACKAGE}.speculative.eagle3",)  # 40043dac
_TREE = (f"{_PACKAGE}.speculative.eagle3_dynamic_tree",)  # 057c8a65
_SLOTS = (f"{_PACKAGE}.speculative.spec_tree_manager",)
_REGISTRY = (f"{_PACKAGE}.models.modeling_utils",)
_MODEL = (f"{_PACKAGE}.models.modeling_speculative",)
#: The folder was renamed between the releases of the window.
_ATTENTION = f"{_PACKAGE}.attention_backend.trtllm", f"{_PACKAGE}.attention.backends.trtllm"  # 017aa0ca


class Need(NamedTuple):
    """One dependency: `name`, dotted for attributes, in the first of `modules` that exists."""

    modules: tuple[str, ...]
    name: str
    parameters: str | None = None  # names in order, `self` included; None: not compared
    mentions: tuple[str, ...] = ()  # what the source must contain
    fields: tuple[str, ...] = ()  # of a dataclass or a pydantic model
    same_as: tuple[str, str] | None = None  # module and name that must be the same object

    @property
    def label(self) -> str:
        """The line's name in tables and messages."""
        return f"{self.modules[0].removeprefix(f'{_PACKAGE}.')}: {self.name}"

    @property
    def expected(self) -> str:
        """The table's word for it."""
        if self.parameters is not None:
            return f"({self.parameters})"
        if self.fields:
            return f"fields {', '.join(self.fields)}"
        return f"is {self.same_as[1]} of {self.same_as[0].rsplit('.', 1)[-1]}" if self.same_as else "is there"


#: Parameters of the two hooks that the tree overrides.
PREPARE = "self, input_ids, position_ids, hidden_states, accepted_tokens, attn_metadata, spec_metadata, draft_model"
DRAFT = (
    "self, inputs, attn_metadata, spec_metadata, draft_model, draft_kv_cache_manager, num_contexts, num_gens,"
    " batch_size, num_accepted_tokens, original_all_rank_num_tokens, resource_manager"
)
_FORWARD = (
    "self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model, resource_manager"
)
_SPEC = "spec_config, model_config, mapping, use_separate_draft_kv_cache"
_INDICES = "_accepted_draft_indices_tensor"
_BUFFERS = ("_accepted_tokens_buf", "_num_accepted_tokens_buf", _INDICES, "tokens_per_gen_step", "_max_path_len")
_STORED = ("packed_mask", "position_offsets", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
_STORAGE = tuple(f"self.{name}" for name in (*_STORED, "has_tree", "all_ids_buf"))
_CALLED = ("sample_and_accept_draft_tokens(", "prepare_1st_drafter_inputs(", "_forward_draft_loop(")
_LOADED = ("self.draft_model.load_weights(", "load_weights_from_target_model(self)")
_METADATA = ("hidden_states", "hidden_size", "layers_to_capture", "gather_ids")
_UPDATED = ("slot_storage", "position_offsets", "packed_mask", "num_contexts")
_ONE_ENGINE = "SpecDecOneEngineForCausalLM"
_WORKER = "Eagle3OneModelDynamicTreeWorker"

NEEDS = (
    # how our classes get in
    Need(_INTERFACE, "SpeculativeDecodingMode.EAGLE3_ONE_MODEL"),
    Need(_REGISTRY, "register_draft_model", "mode"),
    Need(_REGISTRY, "get_registered_draft_model_builder", "mode"),
    Need(_MODEL, "get_draft_model", "model_config, draft_config, lm_head, model", ("builder(",)),
    Need(_UTILS, "get_spec_worker", _SPEC, (_WORKER, "_is_effective_dynamic_tree")),
    Need(_UTILS, "_is_effective_dynamic_tree", "spec_config", ("use_dynamic_tree",)),
    Need(_UTILS, _WORKER, same_as=(*_TREE, _WORKER)),
    # loading
    Need(_MODEL, f"{_ONE_ENGINE}.__init__", None, ("get_draft_model(", "get_spec_worker(")),
    Need(_MODEL, f"{_ONE_ENGINE}.load_draft_weights", "self, weights, weight_mapper", _LOADED),
    # a step
    Need(_EAGLE, "Eagle3OneModelWorker._forward_impl", _FORWARD, _CALLED),
    Need(_TREE, f"{_WORKER}.__init__", None, _BUFFERS),
    Need(_TREE, f"{_WORKER}._ensure_spec_tree_manager", None, ("self.spec_tree_manager",)),
    Need(_TREE, f"{_WORKER}.prepare_1st_drafter_inputs", PREPARE, ("num_ctx_tokens", "hidden_size")),
    Need(_TREE, f"{_WORKER}._forward_draft_loop", DRAFT, ("gather_ids", "all_ids_buf")),
    Need(_TREE, f"{_WORKER}.sample_and_accept_draft_tokens", None, ("_relocate_kv_eagerly(",)),
    Need(_TREE, f"{_WORKER}._finalize_dynamic_tree_verify_outputs", None, ("accepted_tokens", _INDICES)),
    Need(_INTERFACE, "SpecWorkerBase.set_guided_decoder", "self, guided_decoder"),
    # what the step reads and writes
    Need(_SLOTS, "DynamicTreeSlotStorage", None, _STORAGE),
    Need(_SLOTS, "DynamicTreeSlotStorage.mark_valid", "self, slot_ids, count", ("self.has_tree",)),
    Need(_SLOTS, "SpecTreeManager", None, ("slot_storage",)),
    Need(_EAGLE, "Eagle3OneModelSpecMetadata", fields=_METADATA),
    Need(_ATTENTION, "TrtllmAttentionMetadata.update_spec_dec_param", None, _UPDATED),
)


class Row(NamedTuple):
    """A line of the table."""

    need: str
    expected: str
    fault: str  # the mismatch; empty if there is none
    found: str = "as read"


def probe() -> list[Row]:
    """Import what the contract names and compare; the version comes first. Never raises for a mismatch."""
    try:
        package = importlib.import_module("tensorrt_llm")
    except Exception as error:  # a broken CUDA library can raise anything
        return [Row("tensorrt_llm", VERSIONS, f"cannot be imported: {_brief(error)}")]
    version = str(getattr(package, "__version__", "no version"))
    try:
        known = SpecifierSet(VERSIONS, prereleases=True).contains(Version(version))
    except InvalidVersion:
        known = False
    fault = "" if known else f"{version}, a version whose sources were not read"
    return [Row("tensorrt_llm", VERSIONS, fault, version), *(Row(n.label, n.expected, _fault(n)) for n in NEEDS)]


def failures(rows: list[Row]) -> list[str]:
    """The mismatches, one short text each; empty if the contract is met."""
    return [f"{row.need}: {row.fault}" for row in rows if row.fault]


def lines(rows: list[Row]) -> Iterator[str]:
    """The table and the verdict; nothing without rows."""
    for row in rows:
        yield f"{'NO' if row.fault else 'ok':4}{row.need}: {row.fault or row.found}"
        if row.fault:
            yield f"    expected: {row.expected}"
    if rows:
        found = failures(rows)
        yield f"d2sd's tree: {'no: ' + '; '.join(found) if found else 'would be registered, not yet run on a GPU'}"


def _fault(need: Need) -> str:
    """How what is installed differs from a need; empty if it does not."""
    try:
        value = _resolve(next(filter(_exists, need.modules[:-1]), need.modules[-1]), need.name)
        if need.parameters is not None:
            parameters = ", ".join(inspect.signature(value).parameters)
            if parameters != need.parameters:
                return f"({parameters})"
        if need.fields:
            known = getattr(value, "model_fields", None) or [field.name for field in dataclasses.fields(value)]
            if missing := sorted(set(need.fields) - set(known)):
                return f"no field {', '.join(missing)}"
        text = inspect.getsource(value) if need.mentions else ""
        if gone := [word for word in need.mentions if word not in text]:
            return f"no longer mentions {', '.join(gone)}"
        return "another object" if need.same_as and value is not _resolve(*need.same_as) else ""
    except Exception as error:  # import errors of any kind, missing attributes, objects without a signature
        return _brief(error)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of a parent
        return False


def _resolve(module: str, name: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _brief(error: Exception) -> str:
    """One line of an exception."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
