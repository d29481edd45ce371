"""Writes `elsewhere/` of a bundle: what starts other engines with its target and its first drafter.

    engine              file           draws                 run here
    vLLM                vllm.yaml      a chain               no
    SGLang              sglang.yaml    a chain               no
    TensorRT Edge-LLM   edge_llm.sh    a tree of one pass    its exporter, on a CPU (`make consumers`)

A second drafter, and the tree of both, run on d2sd's runtime and inside TensorRT-LLM (`convert.trtllm`). Drafters are
in DFlash's layout, which these engines read. Paths are relative to the bundle's folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import yaml

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.recipe import Recipe

FOLDER = "elsewhere"
#: Of the recipe's `precision`, in the words of both servers.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """An engine that drafts with the first drafter alone."""

    file: str
    command: str  # from the bundle's folder
    #: The file's lines for a recipe and a block size.
    text: Callable[[Recipe, int], str]


def _vllm(recipe: Recipe, block_size: int) -> str:
    """Long options of `vllm serve`, of 0.33."""
    config = {"method": "dflash", "model": "drafter_first", "num_speculative_tokens": block_size - 1}
    return yaml.safe_dump(
        {
            "dtype": _DTYPES[recipe.precision],
            "max-model-len": recipe.limits.max_context,
            "max-num-seqs": recipe.limits.max_batch,
            "speculative-config": json.dumps(config),
        },
        sort_keys=False,
    )


def _sglang(recipe: Recipe, block_size: int) -> str:
    """Long options of `sglang.launch_server`, of 0.5.23."""
    return yaml.safe_dump(
        {
            "model-path": "target",
            "dtype": _DTYPES[recipe.precision],
            "context-length": recipe.limits.max_context,
            "max-running-requests": recipe.limits.max_batch,
            "speculative-algorithm": "DFLASH",
            "speculative-draft-model-path": "drafter_first",
            "speculative-dflash-block-size": block_size,
        },
        sort_keys=False,
    )


def _edge_llm(recipe: Recipe, block_size: int) -> str:
    """Export, build and run with TensorRT Edge-LLM 0.11: more than one candidate a slot makes its DDTree."""
    nodes = recipe.tree.row_budget
    sizes = (
        f"--maxBatchSize {recipe.limits.max_batch} --maxInputLen {recipe.limits.max_context}"
        f" --maxKVCacheCapacity {recipe.limits.max_context + nodes}"
    )
    return f"""\
set -eu
tensorrt-edgellm-export target edge_llm/onnx --dflash-base --dflash-draft --dflash-draft-dir drafter_first
llm_build --onnxDir edge_llm/onnx/llm --engineDir edge_llm/engine {sizes} --maxVerifyTreeSize {nodes} --specBase
llm_build --onnxDir edge_llm/onnx/dflash_draft --engineDir edge_llm/engine {sizes} \\
  --maxDraftTreeSize {nodes} --specDraft
llm_inference --engineDir edge_llm/engine --inputFile "$1" --outputFile "$2" --specDecode --specDraftTopK 8 \\
  --specDraftStep 1 --specVerifySize {nodes} --dflashBlockSize {block_size}
"""


ENGINES: Mapping[str, OtherEngine] = MappingProxyType(
    {
        "vLLM": OtherEngine("vllm.yaml", f"vllm serve target --config {FOLDER}/vllm.yaml", _vllm),
        "SGLang": OtherEngine("sglang.yaml", f"python -m sglang.launch_server --config {FOLDER}/sglang.yaml", _sglang),
        "TensorRT Edge-LLM": OtherEngine(
            "edge_llm.sh", f"sh {FOLDER}/edge_llm.sh requests.json answers.json", _edge_llm
        ),
    }
)


def write_elsewhere(folder: Path, recipe: Recipe) -> None:
    """Write `folder`, a bundle's `elsewhere`, next to its first drafter, which must exist already."""
    trained = HFConfig.read(folder.parent / "drafter_first").size("block_size")
    block_size = min(trained, recipe.tree.block_size)
    folder.mkdir(parents=True)
    for name, engine in ENGINES.items():
        head = (
            f"# {name} with this bundle's first drafter. Not yet run. From the bundle's folder:\n#   {engine.command}\n"
        )
        (folder / engine.file).write_text(head + engine.text(recipe, block_size), "utf-8")
