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


DEFAULTS: dict[str, Any] = {
    "files": "0" * 64,
    "precision": "fp32",
    "block_size": 4,
    "drafters": 2,
    "max_batch": 4,
    "max_context": 64,
    "page_size": 8,
    "calibration": None,
    "policies": POLICIES,
    "backend": "torch",
    "device": "cpu",
    "ranks": None,
}


def measure(**changes: Any) -> Any:
    given = SimpleNamespace(**DEFAULTS | changes)
    bundle: Any = SimpleNamespace(
        manifest=SimpleNamespace(files={"target/model": given.files}),
        recipe=SimpleNamespace(precision=given.precision, exact=False),
        ranks=given.ranks and SimpleNamespace(size=given.ranks),
    )
    given.drafters = range(given.drafters)
    engine: Any = SimpleNamespace(runner=given, calibration=given.calibration, limits=given)
    return step_times.step_times(bundle, engine, given.policies, given.backend)


def file(**changes: Any) -> Path:
    (path,) = measure(**changes).args
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
    assert measure() is measure_step_times


def test_a_system_that_does_not_tell_the_cores_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert step_times._cores() == (os.cpu_count() or 1)
