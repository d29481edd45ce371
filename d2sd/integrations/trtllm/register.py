"""Registers d2sd's tree with the installed TensorRT-LLM, or raises with the reasons why not.

The arguments of a tree name a draft model that TensorRT-LLM alone cannot run, so there is nothing to fall back to: a
server that cannot have the tree does not start. `trtllm/llm_args.dflash.yaml` needs no registration.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from d2sd.convert.trtllm.llm_args import FOLDER, policy_of, tree_policy
from d2sd.errors import D2SDError
from d2sd.integrations.trtllm.contract import failures, probe
from d2sd.integrations.trtllm.tree_drafters import TreeDrafters
from d2sd.integrations.trtllm.tree_worker import tree_worker
from d2sd.manifest import Manifest, load_manifest
from d2sd.plugins import dispatch
from d2sd.policies import PolicyName

SINGLE_PROCESS = "TLLM_WORKER_USE_SINGLE_PROCESS"
POLICY = "D2SD_TRTLLM_POLICY"
#: Builds a draft model of (model_config, draft_config, lm_head, model).
Builder = Callable[[Any, Any, Any, Any], Any]


def register(bundle: Path) -> None:
    """Patch TensorRT-LLM so that it drafts trees with the drafters of `bundle`.

    `D2SD_TRTLLM_POLICY` names another policy than the recipe's. Raises `D2SDError`.
    """
    manifest = load_manifest(bundle)
    name = tree_policy(manifest.recipe, os.environ.get(POLICY))
    refuse("TensorRT-LLM cannot serve d2sd's tree here.", bundle, failures(probe()) or environment_faults())
    speculative = "tensorrt_llm._torch.speculative"
    mode = importlib.import_module(f"{speculative}.interface").SpeculativeDecodingMode.EAGLE3_ONE_MODEL
    models = importlib.import_module("tensorrt_llm._torch.models.modeling_utils")
    stock = models.get_registered_draft_model_builder(mode)
    models.register_draft_model(mode)(tree_builder(bundle, manifest, name, stock))
    base = importlib.import_module(f"{speculative}.eagle3_dynamic_tree").Eagle3OneModelDynamicTreeWorker
    # get_spec_worker is a fixed if-chain, but it looks this name up in its own module.
    vars(importlib.import_module(f"{speculative}.utils"))["Eagle3OneModelDynamicTreeWorker"] = tree_worker(base)


def refuse(what: str, bundle: Path, reasons: list[str]) -> None:
    """Raise `D2SDError` if there are reasons."""
    if reasons:
        raise D2SDError(
            what,
            where=bundle / FOLDER,
            found="; ".join(reasons),
            fix="serve trtllm/llm_args.dflash.yaml, which drafts a chain; d2sd trtllm check --tree prints the table",
        )


def environment_faults() -> list[str]:
    """Why trees cannot be drafted in this process; empty if they can."""
    reasons = []
    if os.environ.get(SINGLE_PROCESS) != "1":
        reasons.append(f"{SINGLE_PROCESS} is not 1, so the worker process would not import this module")
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability >= dispatch.FENCE_CAPABILITY and (found := dispatch.triton_version()) < dispatch.FENCED_TRITON:
            reasons.append(f"triton {found} compiles our attention wrongly for this GPU, which needs 3.7.1")
    return reasons


def tree_builder(bundle: Path, manifest: Manifest, name: PolicyName, stock: Builder) -> Builder:
    """The function that builds the draft model: the bundle's drafters, or the result of `stock` for other models."""

    def build(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
        spec = model_config.spec_config
        if Path(spec.speculative_model).resolve() != (bundle / "drafter_first").resolve():
            return stock(model_config, draft_config, lm_head, model)
        reasons = [*argument_faults(spec, manifest), *target_faults(model_config, manifest)]
        refuse("This server cannot draft trees.", bundle, reasons)
        policy = policy_of(manifest.recipe, name, spec.max_total_draft_tokens + 1)
        # TensorRT-LLM reserves K/V for a draft model, which ours does not use: as little as it takes.
        draft_config.pretrained_config.num_hidden_layers = 1
        print(f"d2sd: trees of {policy}. Not yet run on a GPU: docs/gpu.md", file=sys.stderr, flush=True)
        return TreeDrafters(bundle, manifest, policy, draft_config)

    return build


def argument_faults(spec: Any, manifest: Manifest) -> list[str]:
    """List what is wrong with the speculative arguments, for the drafters of the bundle."""
    length, total = manifest.recipe.tree.depth - 1, spec.max_total_draft_tokens
    faults = {
        "use_dynamic_tree with dynamic_tree_max_topK of at least 2 is needed": not spec.use_dynamic_tree
        or (spec.dynamic_tree_max_topK or 0) < 2,
        f"max_draft_len is {spec.max_draft_len}, and the trees are {length} deep": spec.max_draft_len != length,
        f"max_total_draft_tokens is {total}, less than max_draft_len": not total or total < length,
        "sa_config is set; tree.lookup of the recipe takes its place": getattr(spec, "sa_config", None) is not None,
    }
    return [text for text, fault in faults.items() if fault]


def target_faults(model_config: Any, manifest: Manifest) -> list[str]:
    """Why TensorRT-LLM's tree attention cannot serve this target, or which target it is instead of the bundle's."""
    config, expected = model_config.pretrained_config, manifest.target
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    faults = {
        "more than one GPU": model_config.mapping.world_size != 1,
        "multi-head latent attention": getattr(config, "kv_lora_rank", None) is not None,
        "a sliding window": window is not None or any("sliding" in kind or "chunked" in kind for kind in kinds),
        "layers without attention": any("linear" in kind or "mamba" in kind for kind in kinds)
        or getattr(config, "hybrid_override_pattern", None) is not None,
    }
    sizes = {
        "hidden_size": expected.hidden_size,
        "num_hidden_layers": expected.num_layers,
        "vocab_size": expected.vocab_size,
    }
    found = {key: getattr(config, key, None) for key in sizes}
    return [
        *(f"the target has {name}" for name, fault in faults.items() if fault),
        *(
            f"the target's {key} is {found[key]}, the bundle's {size}"
            for key, size in sizes.items()
            if found[key] != size
        ),
    ]
