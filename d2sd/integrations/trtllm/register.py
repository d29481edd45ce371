"""Registers two drafters with the installed TensorRT-LLM, or leaves it unpatched and logs one line.

It stays unpatched if the contract is not met, if a bundle has one drafter, and if the server would run its worker in
another process, which does not import the module. `D2SD_TRTLLM=require` turns every such case into an error.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from d2sd.errors import D2SDError
from d2sd.integrations.trtllm.drafters import DualDrafter
from d2sd.integrations.trtllm.probe import COMMITS, failures, probe
from d2sd.integrations.trtllm.worker import dual_worker

SINGLE_PROCESS = "TLLM_WORKER_USE_SINGLE_PROCESS"
#: Keys in which two drafters of one target may differ. The others must be equal, as their layers share one cache.
_MAY_DIFFER = {"num_hidden_layers", "max_window_layers", "layer_types", "dflash_config"}
_ROLE = {"training_mode", "prefix_weight_base"}


def register(bundle: Path) -> bool:
    """Patch TensorRT-LLM for the drafters of `bundle`. Returns False, and logs one line, if it stays linear DFlash.

    Raises `D2SDError` instead if the environment sets `D2SD_TRTLLM=require`.
    """
    reasons = incompatibilities(bundle) or failures(probe())
    if not reasons and os.environ.get(SINGLE_PROCESS) != "1":
        reasons = [f"{SINGLE_PROCESS} is not 1, so the worker process would not import this module"]
    if reasons:
        log_linear(reasons)
        return False
    names = {module.rsplit(".", 1)[-1]: importlib.import_module(module) for module in COMMITS}
    mode, models = names["interface"].SpeculativeDecodingMode.DFLASH, names["modeling_utils"]
    builder = _builder(bundle, models.get_registered_draft_model_builder(mode), names["modeling_dflash"])
    models.register_draft_model(mode)(builder)
    # get_spec_worker is a fixed if-chain, but it looks this name up in its own module.
    vars(names["utils"])["DFlashWorker"] = dual_worker(names["dflash"].DFlashWorker, log_linear)
    return True


def log_linear(reasons: list[str]) -> None:
    """Log that the first drafter drafts alone. Raises `D2SDError` if `D2SD_TRTLLM=require` is set."""
    summary = "; ".join(reasons)
    if os.environ.get("D2SD_TRTLLM") == "require":
        raise D2SDError(
            "TensorRT-LLM cannot draft with both drafters here.",
            where="D2SD_TRTLLM=require",
            found=summary,
            fix="d2sd trtllm check prints the full table; without the variable the first drafter drafts alone",
        )
    _log(f"LINEAR DFlash with the first drafter alone: {summary} (d2sd trtllm check prints more)")


def _log(text: str) -> None:
    """Print to stderr, because TensorRT-LLM's logger may have changed."""
    print(f"d2sd: {text}", file=sys.stderr, flush=True)


def incompatibilities(bundle: Path) -> list[str]:
    """Why the drafters of `bundle` cannot share one context cache; empty if they can."""
    configs = []
    for name in ("drafter_first", "drafter_second"):
        try:
            configs.append(json.loads((bundle / name / "config.json").read_text("utf-8")))
        except (OSError, ValueError) as error:
            return [f"{name}: {error}"]
    first, second = configs
    keys = sorted(k for k in (first.keys() | second.keys()) - _MAY_DIFFER if first.get(k) != second.get(k))
    parts = first.get("dflash_config", {}), second.get("dflash_config", {})
    keys += sorted(k for k in (parts[0].keys() | parts[1].keys()) - _ROLE if parts[0].get(k) != parts[1].get(k))
    if keys:
        return [f"the drafters differ in {', '.join(keys)}"]
    if parts[1].get("training_mode") != "vp_drafter":
        return ["drafter_second was not trained on variable prefixes"]
    return []


def _builder(bundle: Path, stock: Any, models: Any) -> Any:
    """The function that builds the draft model: both drafters, or the result of `stock`."""

    def build(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
        first = stock(model_config, draft_config, lm_head, model)
        spec = model_config.spec_config
        reasons = []
        if model_config.mapping.world_size != 1:
            reasons.append("more than one GPU: the drafters' logits would be sharded")
        if spec.attention_backend != "VANILLA":
            reasons.append(f"attention_backend {spec.attention_backend}: the context cache would be paged")
        if Path(spec.speculative_model).resolve() != (bundle / "drafter_first").resolve():
            reasons.append(f"{spec.speculative_model} is not this bundle's first drafter")
        if type(first) is not models.DFlashForCausalLM:
            reasons.append(f"the first drafter is a {type(first).__name__}")
        if reasons:
            log_linear(reasons)
            return first
        # Both configs have one schema (`incompatibilities`); the keys that may differ are taken from the second's file.
        pretrained = copy.deepcopy(draft_config.pretrained_config)
        values = json.loads((bundle / "drafter_second" / "config.json").read_text("utf-8"))
        for key in sorted(_MAY_DIFFER & values.keys()):
            setattr(pretrained, key, values[key])
        config = dataclasses.replace(draft_config, pretrained_config=pretrained)
        second = models.DFlashForCausalLM(config, dflash_attention_backend=spec.attention_backend)
        _log("both drafters, one chain. Its authors have not run this mode: compare it with llm_args.dflash.yaml")
        return DualDrafter(first, second, bundle / "drafter_second")

    return build
