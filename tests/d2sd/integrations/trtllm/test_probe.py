"""The contract against TensorRT-LLMs that fit, and against ones changed in every way the probe is there for."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from d2sd.integrations.trtllm.probe import NEEDS, failures, probe
from tests.d2sd.integrations.trtllm import fake

Modules = dict[str, ModuleType]


def test_known_good(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch)
    rows = probe()
    assert failures(rows) == []
    assert len(rows) == 1 + len(NEEDS)


@pytest.mark.parametrize("version", ["1.3.0rc22", "1.3.0", "1.4.0rc1", "1.4.0rc1+cu13"])
def test_versions_whose_sources_were_read(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake.install(monkeypatch, version)
    assert failures(probe()) == []


@pytest.mark.parametrize("version", ["1.4.0rc2", "1.4.0", "2.0.0", "1.3.0rc21", "1.2.1", "no version"])
def test_another_version_is_refused_though_every_name_fits(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake.install(monkeypatch, version)
    (reason,) = failures(probe())
    assert version in reason


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    (reason,) = failures(probe())
    assert "cannot be imported" in reason


def renamed_class(modules: Modules) -> None:
    vars(modules["modeling_dflash"])["DFlash2ForCausalLM"] = vars(modules["modeling_dflash"]).pop("DFlashForCausalLM")


def changed_signature(modules: Modules) -> None:
    class DFlashForCausalLM(fake.DFlashForCausalLM):
        def dflash_forward(self, noise_embedding: Any, query_positions: Any, cache: Any) -> Any:  # type: ignore[override]
            return None

    vars(modules["modeling_dflash"])["DFlashForCausalLM"] = DFlashForCausalLM


def parameters_in_another_order(modules: Modules) -> None:
    def get_spec_worker(
        model_config: Any, spec_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False
    ) -> Any:
        return fake.DFlashWorker

    vars(modules["utils"])["get_spec_worker"] = get_spec_worker


def missing_enum(modules: Modules) -> None:
    vars(modules["interface"])["SpeculativeDecodingMode"] = enum.IntEnum("SpeculativeDecodingMode", ["PARD"])


def hook_no_longer_called(modules: Modules) -> None:
    class DFlashWorker(fake.DFlashWorker):
        def _forward_impl(self, *args: Any, **kwargs: Any) -> Any:
            return self.prepare_1st_drafter_inputs(*args, **kwargs)

    vars(modules["dflash"])["DFlashWorker"] = vars(modules["utils"])["DFlashWorker"] = DFlashWorker


def another_worker_is_used(modules: Modules) -> None:
    vars(modules["utils"])["DFlashWorker"] = type("DFlashWorker", (fake.DFlashWorker,), {})


def module_gone(modules: Modules) -> None:
    sys.modules[f"{fake.PACKAGE}.models.modeling_utils"] = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (renamed_class, "DFlashForCausalLM"),
        (changed_signature, "dflash_forward: (self, noise_embedding, query_positions, cache)"),
        (parameters_in_another_order, "get_spec_worker: (model_config, spec_config"),
        (missing_enum, "DFLASH"),
        (hook_no_longer_called, "_forward_impl: no longer mentions _refine_block_logits"),
        (another_worker_is_used, "utils: DFlashWorker: another object"),
        (module_gone, "modeling_utils"),
    ],
)  # fmt: skip
def test_a_changed_version_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Modules], None], complaint: str
) -> None:
    change(fake.install(monkeypatch))
    reasons = failures(probe())
    assert any(complaint in reason for reason in reasons), reasons
