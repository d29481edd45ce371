"""The modules of the package that d2sd imports, with their registries and the loading of a draft model."""

from __future__ import annotations

import enum
import importlib
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.d2sd.integrations.trtllm.standin import metadata, ops, slots, sources, worker

PACKAGE = "tensorrt_llm._torch"


class SpeculativeDecodingMode(enum.IntEnum):
    EAGLE3_ONE_MODEL = enum.auto()
    DFLASH = enum.auto()


BUILDERS: dict[Any, Callable[..., Any]] = {}


def register_draft_model(mode: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorator(builder: Callable[..., Any]) -> Callable[..., Any]:
        BUILDERS[mode] = builder
        return builder

    return decorator


def get_registered_draft_model_builder(mode: Any) -> Any:
    return BUILDERS.get(mode, lambda *args: nn.Identity())


def get_draft_model(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
    builder = get_registered_draft_model_builder(SpeculativeDecodingMode.EAGLE3_ONE_MODEL)
    return builder(model_config, draft_config, lm_head, model)


def _is_effective_dynamic_tree(spec_config: Any) -> bool:
    return bool(spec_config.use_dynamic_tree) and (spec_config.dynamic_tree_max_topK or 0) > 1


def get_spec_worker(
    spec_config: Any, model_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False
) -> Any:
    utils: Any = sys.modules[f"{PACKAGE}.speculative.utils"]
    assert utils._is_effective_dynamic_tree(spec_config)
    return utils.Eagle3OneModelDynamicTreeWorker(spec_config, mapping, use_separate_draft_kv_cache)


class SpecDecOneEngineForCausalLM(nn.Module):
    """Makes draft model and worker, loads the draft model after the target; the target is `model` and `lm_head`."""

    def __init__(self, model: Any, lm_head: Any, model_config: Any, draft_config: Any) -> None:
        super().__init__()
        self.model, self.lm_head = model, lm_head
        self.draft_model = get_draft_model(model_config, draft_config, lm_head, model)
        assert not list(self.draft_model.parameters()), "built before there are weights"
        utils: Any = sys.modules[f"{PACKAGE}.speculative.utils"]
        self.spec_worker = utils.get_spec_worker(model_config.spec_config, model_config, model_config.mapping)
        self.spec_worker.set_draft_model(self.draft_model)

    def load_draft_weights(self, weights: Any, weight_mapper: Any = None) -> None:
        self.draft_model.load_weights(weights=weights, weight_mapper=weight_mapper)
        self.draft_model.load_weights_from_target_model(self)


_CONTENT: dict[str, tuple[Any, ...]] = {
    "tensorrt_llm": (),
    PACKAGE: (),
    f"{PACKAGE}.attention_backend": (),
    f"{PACKAGE}.attention_backend.trtllm": (metadata.TrtllmAttentionMetadata,),
    f"{PACKAGE}.models": (),
    f"{PACKAGE}.models.modeling_speculative": (get_draft_model, SpecDecOneEngineForCausalLM),
    f"{PACKAGE}.models.modeling_utils": (register_draft_model, get_registered_draft_model_builder),
    f"{PACKAGE}.speculative": (),
    f"{PACKAGE}.speculative.eagle3": (worker.Eagle3OneModelWorker, metadata.Eagle3OneModelSpecMetadata),
    f"{PACKAGE}.speculative.eagle3_dynamic_tree": (worker.Eagle3OneModelDynamicTreeWorker,),
    f"{PACKAGE}.speculative.interface": (SpeculativeDecodingMode, worker.SpecWorkerBase),
    f"{PACKAGE}.speculative.spec_tree_manager": (slots.DynamicTreeSlotStorage, slots.SpecTreeManager),
    f"{PACKAGE}.speculative.utils": (
        get_spec_worker,
        _is_effective_dynamic_tree,
        worker.Eagle3OneModelDynamicTreeWorker,
    ),
}


def install(monkeypatch: pytest.MonkeyPatch, version: str = "1.4.0rc1") -> dict[str, Any]:
    """Put the stand-in where imports find it; return its modules by their last names, to be changed by a test."""
    BUILDERS.clear()
    ops.POOLS.clear()
    found = {}
    for name, content in _CONTENT.items():
        module: Any = types.ModuleType(name)
        module.__path__ = []  # a package, so that `find_spec` looks inside
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        for thing in content:
            setattr(module, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, name, module)
        found[name.rsplit(".", 1)[-1]] = module
    vars(found["tensorrt_llm"])["__version__"] = version
    sources.replace_by_sources(monkeypatch, found)
    return found


class Resources:
    """`resource_manager`: the spec tree manager and the K/V of the target."""

    def __init__(self, spec_tree_manager: Any, cache: Any) -> None:
        self._managers = {"spec": SimpleNamespace(spec_tree_manager=spec_tree_manager), "kv": cache}

    def get_resource_manager(self, kind: Any) -> Any:
        return self._managers[getattr(kind, "value", kind)]
