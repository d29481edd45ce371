"""The LLM-API arguments our YAML may hold: names, types and defaults of TensorRT-LLM's `llmapi/llm_args.py`.

TensorRT-LLM refuses keys it does not know, and it cannot be installed where bundles are built, so the YAML is checked
against these models instead. `DFlash` is complete; the other two list the keys that we write. Read at `COMMIT`; the
sources do not name its release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from d2sd.errors import BundleError

COMMIT = "0004396720054fd8e205cbf616f21f0b57c6b412"
AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class KvCache(_Section):
    """Arguments of `KvCacheConfig`."""

    dtype: str = "auto"
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: Fraction | None = 0.9


class DFlash(_Section):
    """`DFlashDecodingConfig` with its base `DecodingBaseConfig`."""

    decoding_type: Literal["DFlash"] = "DFlash"
    attention_backend: Literal["VANILLA", "TRTLLM"] = "VANILLA"
    mask_token_id: int | None = None  # None: of the drafter's config.json
    target_layer_ids: list[int] | None = None  # the same
    max_draft_len: AtLeast0 | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | None = None  # `speculative_model_dir` is its other name
    max_concurrency: AtLeast1 | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None
    acceptance_rate_window_size: AtLeast0 | None = None
    acceptance_rate_threshold: Fraction | None = None
    use_rejection_sampling: bool = False
    allow_advanced_sampling: bool = False
    advanced_sampling_mode: Literal["full", "no_topk", "no_topp", "no_topk_no_topp"] = "full"
    enable_penalty: bool = False


class Arguments(_Section):
    """Arguments of `TorchLlmArgs` with its base `BaseLlmArgs`."""

    backend: Literal["pytorch", "_autodeploy"] | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_batch_size: int | None = 2048
    max_seq_len: int | None = None
    kv_cache_config: KvCache = KvCache()
    speculative_config: DFlash | None = None


def check_arguments(values: Mapping[str, object], where: str) -> Arguments:
    """Check arguments as TensorRT-LLM does: unknown keys, wrong types, values out of bounds. Raises `BundleError`."""
    try:
        return Arguments.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise BundleError(
            "TensorRT-LLM does not accept this argument.",
            where=f"{where}: {'.'.join(map(str, first['loc']))}", found=repr(first["input"]), expected=first["msg"],
        ) from None  # fmt: skip
