"""Writes `trtllm/` of a bundle: TensorRT-LLM arguments with one and with both drafters, and a module for the latter.

    trtllm/llm_args.dflash.yaml     the first drafter, with TensorRT-LLM alone
    trtllm/llm_args.d2sd.yaml       the same arguments, for a server that imports the module
    trtllm/d2sd_trtllm/__init__.py  the module (`trtllm-serve --custom_module_dirs`)

The arguments are the same because their schema is closed: it has no key for a second drafter, so the module looks for
it next to the first one. Paths are relative to the bundle's folder.

TensorRT-LLM refuses keys it does not know, and it cannot be installed where bundles are built, so the YAML is checked
against models of its arguments instead: names, types and defaults of `llmapi/llm_args.py`, read at `COMMIT`; the
sources do not name its release. `DFlash` is complete; the other two list the keys that we write.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.errors import BundleError
from d2sd.recipe import Recipe

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
            where=f"{where}: {'.'.join(map(str, first['loc']))}",
            found=repr(first["input"]),
            expected=first["msg"],
        ) from None


FOLDER, MODULE = "trtllm", "d2sd_trtllm"
DFLASH, D2SD = "llm_args.dflash.yaml", "llm_args.d2sd.yaml"

_HEADER = """\
# {title}
# Not yet run. Every key was checked against TensorRT-LLM's llm_args.py at {commit}.
# From this bundle's folder:
#   {command}
# enable_block_reuse is off because DFlash needs the target's features of the prompt: with a prompt reused from the K/V
# cache the drafter would have no context. max_seq_len is given because it determines the size of the drafter's cache.
"""
_TITLES = {
    DFLASH: "The first drafter with TensorRT-LLM alone: plain DFlash, one chain.",
    D2SD: "Both drafters, one chain (no tree); plain DFlash if the module does not support the installed version.",
}
_COMMANDS = {
    DFLASH: f"trtllm-serve target --config {FOLDER}/{DFLASH}",
    # One process, or the workers would not see the module; no bytecode, or the bundle would contain an unlisted file.
    D2SD: "PYTHONDONTWRITEBYTECODE=1 TLLM_WORKER_USE_SINGLE_PROCESS=1 trtllm-serve target "
    f"--config {FOLDER}/{D2SD} --custom_module_dirs {FOLDER}/{MODULE}",
}


def unsupported_reason(recipe: Recipe) -> str | None:
    """Why TensorRT-LLM cannot serve the bundle of `recipe`; None if it can."""
    if recipe.drafters.first is None:
        return "there is no drafter"
    if recipe.precision == "fp32":
        return "its drafter attention supports 16-bit numbers only, and precision is fp32"
    return None


def write_llm_args(folder: Path, recipe: Recipe) -> None:
    """Write `folder`, a bundle's `trtllm`, next to the drafters, which must exist already. Raises `D2SDError`.

    `unsupported_reason(recipe)` must be None.
    """
    assert unsupported_reason(recipe) is None
    values = arguments(HFConfig.read(folder.parent / "drafter_first"), recipe)
    names = [DFLASH] if recipe.drafters.second is None else [DFLASH, D2SD]
    folder.mkdir(parents=True)
    for name in names:
        check_arguments(values, str(folder / name))
        header = _HEADER.format(title=_TITLES[name], commit=COMMIT[:12], command=_COMMANDS[name])
        (folder / name).write_text(header + yaml.safe_dump(values, sort_keys=False), "utf-8")
    if D2SD in names:
        (folder / MODULE).mkdir()
        shutil.copyfile(Path(__file__).with_name(f"{MODULE}.py"), folder / MODULE / "__init__.py")


def arguments(drafter: HFConfig, recipe: Recipe) -> dict[str, Any]:
    """Return the LLM-API arguments for a first drafter's config; no key that affects the output is left to a default.

    The drafter computes max_draft_len + 1 slots, and was trained with `block_size` of them.
    """
    part = drafter.part("dflash_config")
    return {
        "backend": "pytorch",
        "tensor_parallel_size": 1,
        "max_batch_size": recipe.limits.max_batch,
        "max_seq_len": recipe.limits.max_context,
        "kv_cache_config": {"enable_block_reuse": False},
        "speculative_config": {
            "decoding_type": "DFlash",
            "speculative_model": "drafter_first",
            "max_draft_len": drafter.size("block_size") - 1,
            "mask_token_id": part.get("mask_token_id", int),
            "target_layer_ids": list(part.integers("target_layer_ids")),
            "attention_backend": "VANILLA",  # FlashAttention; TRTLLM is for SM100 and SM103 only
        },
    }


def check_llm_args(bundle: Path) -> list[str]:
    """Check the YAML of a bundle, which may have been edited, and return its names. Raises `BundleError`."""
    folder = bundle / FOLDER
    names = [name for name in (DFLASH, D2SD) if (folder / name).is_file()]
    if not names:
        raise BundleError("The bundle has no TensorRT-LLM arguments.", where=folder, fix="build it in bf16 or fp16")
    for name in names:
        try:
            values = yaml.safe_load((folder / name).read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise BundleError("Not valid YAML.", where=folder / name, found=error) from None
        if not isinstance(values, dict):
            raise BundleError("Arguments are a mapping of keys.", where=folder / name, found=type(values).__name__)
        speculative_config = check_arguments(values, str(folder / name)).speculative_config
        drafter = HFConfig.read(bundle / "drafter_first")
        limit = drafter.size("block_size") - 1
        if speculative_config is not None and not 1 <= (speculative_config.max_draft_len or 0) <= limit:
            raise BundleError(
                "The drafter was not trained for this many draft tokens.",
                where=f"{folder / name}: speculative_config.max_draft_len",
                found=speculative_config.max_draft_len,
                expected=f"1 to {limit}",
            )
    return names
