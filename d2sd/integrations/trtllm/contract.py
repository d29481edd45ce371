"""The parts of TensorRT-LLM that the tree uses, as they are in the sources that were read; `probe.py` compares them.

Files were read at the commits of `COMMITS`, one each: the sources do not name a release. What they do not show, types
and sizes of tensors, is compared at the first step (`tree_worker.check_step`).
"""

from __future__ import annotations

from dataclasses import dataclass

#: The window of package versions that is patched. Earlier ones pin a Triton that miscompiles our attention on Hopper.
VERSIONS = ">=1.3.0rc27,<=1.4.0rc1"

_PACKAGE = "tensorrt_llm._torch"
_INTERFACE = f"{_PACKAGE}.speculative.interface"
_UTILS = f"{_PACKAGE}.speculative.utils"
_EAGLE = f"{_PACKAGE}.speculative.eagle3"
_TREE = f"{_PACKAGE}.speculative.eagle3_dynamic_tree"
_SLOTS = f"{_PACKAGE}.speculative.spec_tree_manager"
_REGISTRY = f"{_PACKAGE}.models.modeling_utils"
_MODEL = f"{_PACKAGE}.models.modeling_speculative"
#: The folder was renamed between the releases of the window.
_ATTENTION = f"{_PACKAGE}.attention_backend.trtllm", f"{_PACKAGE}.attention.backends.trtllm"

COMMITS = {
    _INTERFACE: "00b6d5a25c30b4382d24fbdf52956d601b3ffd24",
    _UTILS: "011d0933dcb5e592f5fa2626beaf42a96324c578",
    _EAGLE: "40043dac",
    _TREE: "057c8a65",
    _SLOTS: "a commit not recorded",
    _REGISTRY: "a commit not recorded",
    _MODEL: "a commit not recorded",
    _ATTENTION[0]: "017aa0ca",
}


@dataclass(frozen=True, slots=True)
class Need:
    """One dependency: `name`, dotted for attributes, in the first of `modules` that exists."""

    modules: tuple[str, ...]
    name: str
    parameters: str | None = None  # names in order, `self` included; None: not compared
    fields: tuple[str, ...] = ()  # of a dataclass or a pydantic model
    mentions: tuple[str, ...] = ()  # what the source must contain
    same_as: tuple[str, str] | None = None  # module and name that must be the same object

    @property
    def label(self) -> str:
        """The line's name in tables and messages."""
        return f"{self.modules[0].removeprefix(f'{_PACKAGE}.')}: {self.name}"


#: Parameters of the two hooks that the tree overrides.
PREPARE = "self, input_ids, position_ids, hidden_states, accepted_tokens, attn_metadata, spec_metadata, draft_model"
DRAFT = (
    "self, inputs, attn_metadata, spec_metadata, draft_model, draft_kv_cache_manager, num_contexts, num_gens,"
    " batch_size, num_accepted_tokens, original_all_rank_num_tokens, resource_manager"
)
_FORWARD = (
    "self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model, resource_manager"
)
_BUFFERS = ("_accepted_tokens_buf", "_num_accepted_tokens_buf", "_accepted_draft_indices_tensor")
_STORED = (
    "self.packed_mask",
    "self.position_offsets",
    "self.retrieve_index",
    "self.retrieve_next_token",
    "self.retrieve_next_sibling",
    "self.has_tree",
    "self.all_ids_buf",
)
_WORKER = "Eagle3OneModelDynamicTreeWorker"

NEEDS = (
    # how our classes get in
    Need((_INTERFACE,), "SpeculativeDecodingMode.EAGLE3_ONE_MODEL"),
    Need((_REGISTRY,), "register_draft_model", "mode"),
    Need((_REGISTRY,), "get_registered_draft_model_builder", "mode"),
    Need((_MODEL,), "get_draft_model", "model_config, draft_config, lm_head, model", mentions=("builder(",)),
    Need(
        (_UTILS,),
        "get_spec_worker",
        "spec_config, model_config, mapping, use_separate_draft_kv_cache",
        mentions=(_WORKER, "_is_effective_dynamic_tree"),
    ),
    Need((_UTILS,), "_is_effective_dynamic_tree", "spec_config", mentions=("use_dynamic_tree",)),
    Need((_UTILS,), _WORKER, same_as=(_TREE, _WORKER)),
    # loading
    Need((_MODEL,), "SpecDecOneEngineForCausalLM.__init__", mentions=("get_draft_model(", "get_spec_worker(")),
    Need(
        (_MODEL,),
        "SpecDecOneEngineForCausalLM.load_draft_weights",
        "self, weights, weight_mapper",
        mentions=("self.draft_model.load_weights(", "load_weights_from_target_model(self)"),
    ),
    # a step
    Need(
        (_EAGLE,),
        "Eagle3OneModelWorker._forward_impl",
        _FORWARD,
        mentions=("sample_and_accept_draft_tokens(", "prepare_1st_drafter_inputs(", "_forward_draft_loop("),
    ),
    Need((_TREE,), f"{_WORKER}.__init__", mentions=(*_BUFFERS, "tokens_per_gen_step", "_max_path_len")),
    Need((_TREE,), f"{_WORKER}._ensure_spec_tree_manager", mentions=("self.spec_tree_manager",)),
    Need((_TREE,), f"{_WORKER}.prepare_1st_drafter_inputs", PREPARE, mentions=("num_ctx_tokens", "hidden_size")),
    Need((_TREE,), f"{_WORKER}._forward_draft_loop", DRAFT, mentions=("gather_ids", "all_ids_buf")),
    Need((_TREE,), f"{_WORKER}.sample_and_accept_draft_tokens", mentions=("_relocate_kv_eagerly(",)),
    Need((_TREE,), f"{_WORKER}._finalize_dynamic_tree_verify_outputs", mentions=("accepted_tokens", _BUFFERS[2])),
    Need((_INTERFACE,), "SpecWorkerBase.set_guided_decoder", "self, guided_decoder"),
    # what the step reads and writes
    Need((_SLOTS,), "DynamicTreeSlotStorage", mentions=_STORED),
    Need((_SLOTS,), "DynamicTreeSlotStorage.mark_valid", "self, slot_ids, count", mentions=("self.has_tree",)),
    Need((_SLOTS,), "SpecTreeManager", mentions=("slot_storage",)),
    Need(
        (_EAGLE,),
        "Eagle3OneModelSpecMetadata",
        fields=("hidden_states", "hidden_size", "layers_to_capture", "gather_ids"),
    ),
    Need(
        _ATTENTION,
        "TrtllmAttentionMetadata.update_spec_dec_param",
        mentions=("slot_storage", "position_offsets", "packed_mask", "num_contexts"),
    ),
)
