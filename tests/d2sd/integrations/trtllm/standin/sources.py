"""TensorRT-LLM's own Python files in place of the stand-in's modules: `make trtllm-sources FROM=folder`.

The folder has files by their paths in the package, or alone; each replaces the module of its name, and what it imports
and does not have is a stand-in or an empty name. Devices are read as the CPU. The files stay where they are.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.d2sd.integrations.trtllm.standin import worker

VARIABLE = "D2SD_TRTLLM_SOURCES"
PACKAGE = "tensorrt_llm._torch"
#: In the order in which they import each other. A name of the module -> names that `speculative.utils` takes from it.
FILES = {
    f"{PACKAGE}.speculative.spec_tree_manager": (),
    f"{PACKAGE}.speculative.dynamic_tree_ops": (),
    f"{PACKAGE}.speculative.eagle3_dynamic_tree": ("Eagle3OneModelDynamicTreeWorker",),
}


def replace_by_sources(monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]) -> list[str]:
    """Execute the files of the folder that the environment names; returns the names of their modules."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return []
    for name, content in _stubs().items():
        for parent in _parents(name):
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, _Empty(parent))
        stub = sys.modules.get(name) or _Empty(name)
        vars(stub).update(content)
        monkeypatch.setitem(sys.modules, name, stub)
    replaced = []
    for name, exported in FILES.items():
        path = _find(Path(folder), name)
        if path is None:
            continue
        module: Any = types.ModuleType(name)
        module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
        monkeypatch.setitem(sys.modules, name, module)
        text = path.read_text("utf-8").replace("'cuda'", "'cpu'").replace('"cuda"', '"cpu"')
        exec(compile(text, str(path), "exec"), vars(module))
        modules[name.rsplit(".", 1)[-1]] = module
        for thing in exported:
            setattr(modules["utils"], thing, getattr(module, thing))
        replaced.append(name)
    assert replaced, f"none of {', '.join(FILES)} in {folder}"
    return replaced


class _Empty(types.ModuleType):
    """A module of whatever is asked of it, of which nothing is used."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _stubs() -> dict[str, dict[str, Any]]:
    """Modules that the files import, with the names that the path runs."""

    def nvtx_range(*args: Any, **kwargs: Any) -> Any:
        return lambda function: function

    def sampled(logits: Any, temperatures: Any, *args: Any, **kwargs: Any) -> Any:
        return worker.sampled(logits, temperatures)

    def probabilities(logits: Any, temperatures: Any, *args: Any, **kwargs: Any) -> Any:
        return worker.probabilities(logits, temperatures)

    kinds = types.SimpleNamespace(SPEC_RESOURCE_MANAGER="spec", KV_CACHE_MANAGER="kv")
    data = types.SimpleNamespace(
        HALF=torch.float16, BF16=torch.bfloat16, FLOAT=torch.float32, FP8="fp8", INT8="int8", NVFP4="nvfp4"
    )
    return {
        "tensorrt_llm._utils": {"prefer_pinned": lambda: False, "nvtx_range": nvtx_range, "get_sm_version": lambda: 90},
        "tensorrt_llm.bindings": {"DataType": data},
        f"{PACKAGE}.attention_backend": {"AttentionMetadata": object},
        f"{PACKAGE}.pyexecutor.resource_manager": {"ResourceManagerType": kinds},
        f"{PACKAGE}.pyexecutor.sampler.sampling_utils": {
            "compute_probs_from_logits": probabilities,
            "sampling_batch_spec_dec_one_model": sampled,
        },
    }


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _find(folder: Path, name: str) -> Path | None:
    path = Path(*name.split(".")).with_suffix(".py")
    return next((p for p in (folder / path, folder / path.name) if p.is_file()), None)
