"""TensorRT-LLM's arguments as pydantic models: names, types and defaults of the published reference of `RELEASE`.

TensorRT-LLM refuses keys that it does not know, and it cannot be installed where bundles are built, so the YAML of
bundles is checked against these. `DFlash` and `Eagle3` are complete; the others list the keys that we write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from d2sd.errors import BundleError

#: nvidia.github.io/TensorRT-LLM/1.4.0rc1/llm-api/reference
RELEASE = "1.4.0rc1"
AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
MoeBackend = Literal[
    "AUTO", "CUTLASS", "CUTEDSL", "CUTEDSL_FC12", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA", "TRITON", "MARLIN",
    "MEGAMOE_DEEPGEMM", "MEGAMOE_CUTEDSL",
]  # fmt: skip
#: Siblings of a node that rejection sampling tries.
MOST_SIBLINGS = 32


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class KvCache(_Section):
    """Arguments of `KvCacheConfig`."""

    dtype: str = "auto"
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: Fraction | None = 0.9


class Decoding(_Section):
    """`DecodingBaseConfig`: keys of every mode."""

    max_draft_len: AtLeast0 | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | None = None  # `speculative_model_dir` is its other name
    moe_backend: MoeBackend | None = None  # not in 1.3.0rc27
    max_concurrency: AtLeast1 | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None
    acceptance_rate_window_size: AtLeast0 | None = None
    acceptance_rate_threshold: Fraction | None = None
    use_rejection_sampling: bool = False
    allow_advanced_sampling: bool = False
    advanced_sampling_mode: Literal["full", "no_topk", "no_topp", "no_topk_no_topp"] = "full"
    enable_penalty: bool = False
    spec_dec_variant: AtLeast1 | None = None  # not in 1.3.0rc27


class DFlash(Decoding):
    """`DFlashDecodingConfig`."""

    decoding_type: Literal["DFlash"] = "DFlash"
    attention_backend: Literal["VANILLA", "TRTLLM", "FA4"] = "VANILLA"
    mask_token_id: int | None = None  # None: of the drafter's config.json
    target_layer_ids: list[int] | None = None  # the same
    context_recompute_tail: int | None = 0
    skip_ctx_buffer_budget_check: bool = False


class SAEnhancer(_Section):
    """Arguments of `SAEnhancerConfig`."""

    threshold: AtLeast1 = 4
    enable_global_pool: bool = False


class Eagle3(Decoding):
    """`Eagle3DecodingConfig`, with what its validators ask of a dynamic tree."""

    decoding_type: Literal["Eagle3"] = "Eagle3"
    use_dynamic_tree: bool | None = False
    dynamic_tree_max_topK: int | None = None
    num_eagle_layers: int | None = None
    max_non_leaves_per_layer: int | None = None
    eagle3_layers_to_capture: Annotated[set[int], Field(strict=False)] | None = None
    eagle3_model_arch: Literal["llama3", "mistral_large3"] = "llama3"
    sa_config: SAEnhancer | None = None

    @model_validator(mode="after")
    def _tree(self) -> Self:
        length, total, width = self.max_draft_len or 0, self.max_total_draft_tokens, self.dynamic_tree_max_topK or 0
        if self.speculative_model is None or not length:
            raise ValueError("Eagle3 needs speculative_model and max_draft_len above 0")
        if self.use_dynamic_tree and width < 1:
            raise ValueError("use_dynamic_tree needs dynamic_tree_max_topK")
        if self.use_dynamic_tree and total is not None and not length <= total <= width * length:
            raise ValueError("max_total_draft_tokens must be max_draft_len .. dynamic_tree_max_topK * max_draft_len")
        if self.use_dynamic_tree and self.use_rejection_sampling and width > MOST_SIBLINGS:
            raise ValueError(f"with use_rejection_sampling, dynamic_tree_max_topK must be at most {MOST_SIBLINGS}")
        return self


class Arguments(_Section):
    """Arguments of `TorchLlmArgs` with its base `BaseLlmArgs`."""

    backend: Literal["pytorch", "_autodeploy"] | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_batch_size: int | None = 2048
    max_num_tokens: int | None = 8192
    max_seq_len: int | None = None
    kv_cache_config: KvCache = KvCache()
    speculative_config: Annotated[DFlash | Eagle3, Field(discriminator="decoding_type")] | None = None


def check_arguments(values: Mapping[str, object], where: str) -> Arguments:
    """Check arguments as TensorRT-LLM does: unknown keys, wrong types, values out of bounds. Raises `BundleError`."""
    try:
        return Arguments.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise BundleError(
            "TensorRT-LLM does not accept this argument.",
            where=f"{where}: {'.'.join(map(str, first['loc']))}",
            found=repr(first["input"]),
            expected=first["msg"],
        ) from None
