"""The file of step times has another name wherever a step may take another time."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from d2sd.bundle import step_times
from d2sd.runtime.speculation.policy import Chain, DDTree, Hybrid, Off
from d2sd.runtime.step_times import measure_step_times

POLICIES = [Off(1), Chain(4), Hybrid(8, 2)]


def file(
    *,
    files: str = "0" * 64,
    precision: str = "fp32",
    block_size: int = 4,
    drafters: int = 2,
    max_batch: int = 4,
    max_context: int = 64,
    page_size: int = 8,
    calibration: object = None,
    policies: Any = POLICIES,
    backend: Any = "torch",
    device: str = "cpu",
    ranks: int | None = None,
) -> Path:
    bundle: Any = SimpleNamespace(
        manifest=SimpleNamespace(files={"target/model": files}),
        recipe=SimpleNamespace(precision=precision, exact=False),
        ranks=ranks and SimpleNamespace(size=ranks),
    )
    engine: Any = SimpleNamespace(
        runner=SimpleNamespace(device=device, block_size=block_size, drafters=range(drafters)),
        calibration=calibration,
        limits=SimpleNamespace(max_batch=max_batch, max_context=max_context, page_size=page_size),
    )
    measure: Any = step_times.step_times(bundle, engine, policies, backend)
    (path,) = measure.args
    return Path(path)


def test_equal_conditions_give_one_file_in_the_cache_folder() -> None:
    assert file() == file()
    assert file().parent == Path(os.environ["XDG_CACHE_HOME"]) / "d2sd"


@pytest.mark.parametrize(
    "changes",
    [
        {"files": "1" * 64},
        {"precision": "bf16"},
        {"block_size": 8},
        {"drafters": 1},
        {"max_batch": 8},
        {"max_context": 512},
        {"page_size": 16},
        {"calibration": "any"},
        {"backend": "onnx"},
        {"ranks": 2},
        {"policies": POLICIES[:2]},
        {"policies": [*POLICIES[:2], Hybrid(8, 3)]},
        {"policies": [*POLICIES[:2], DDTree(8, 2)]},
        {"policies": [*POLICIES[:2], Hybrid(16, 2)]},
    ],
    ids=str,
)
def test_other_models_and_limits_have_another(changes: dict[str, Any]) -> None:
    assert file(**changes) != file()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("processor", lambda: "other"),
        ("library.name", lambda: "cpu-other.so"),
        ("library.name", lambda: None),
        ("os.sched_getaffinity", lambda pid: {0, 1, 2}),
        ("torch.get_num_threads", lambda: 63),
        ("code", lambda: "x"),
        ("package_version", lambda package: "0"),
    ],
)
def test_another_machine_has_another(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file()
    monkeypatch.setattr(f"d2sd.bundle.step_times.{name}", value)
    assert file() != before


def test_a_gpu_is_known_by_its_name_and_not_by_the_kernels_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"cuda": "NVIDIA H100", "cuda:1": "NVIDIA L4"}
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr("d2sd.bundle.step_times.library.name", None)
    assert len({file(device="cuda"), file(device="cuda:1")}) == 2


def test_a_user_without_a_home_measures_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    bundle: Any = SimpleNamespace(
        manifest=SimpleNamespace(files={}), recipe=SimpleNamespace(precision="fp32", exact=False), ranks=None
    )
    runner = SimpleNamespace(device="cpu", block_size=4, drafters={})
    limits = SimpleNamespace(max_batch=1, max_context=64, page_size=8)
    engine: Any = SimpleNamespace(runner=runner, calibration=None, limits=limits)
    assert step_times.step_times(bundle, engine, POLICIES, "torch") is measure_step_times


def test_a_system_that_does_not_tell_the_cores_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert step_times._cores() == (os.cpu_count() or 1)
