"""What engines measured on the user's GPU, found again for a capacity sheet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from d2sd.bench import measured
from d2sd.bundle.product_times import write
from d2sd.bundle.step_times import About, kept_step_times
from d2sd.io import digest
from d2sd.manifest import NAME
from d2sd.modeling.product_forms import ProductShape
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.product_times import Times
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.policy import Chain, Off
from d2sd.runtime.step_times import StepTimes

H100 = "NVIDIA H100 80GB HBM3"
POLICIES = Off(1), Chain(4)
FILES = {"target/model": "0" * 64}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("D2SD_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def keep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file of step times as an engine does; each takes longer than the one before, and is newer."""
    count = iter(range(1, 99))

    def write_times(**changed: Any) -> Path:
        number = next(count)
        times = StepTimes({(policy, size): 0.01 * number for policy in POLICIES for size in (1, 2)}, {}, {})
        monkeypatch.setattr("d2sd.bundle.step_times.measure_step_times", lambda *_: times)
        about: dict[str, Any] = {"gpu": H100, "bundle": digest(FILES), "backend": "torch", "ranks": 1} | changed
        path, runner = folder / f"step-times-{number}.json", cast("ModelRunner", None)
        kept_step_times(path, runner, POLICIES, {}, Limits(2, 64, 4, 16), about=About(**about))
        os.utime(path, (number, number))
        return path

    return write_times


def plan_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plan of a bundle with these files."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / NAME).write_text("")
    monkeypatch.setattr(measured, "load_manifest", lambda _: SimpleNamespace(files=FILES))
    return SimpleNamespace(recipe=SimpleNamespace(folder=bundle), ranks=1)


def test_the_newest_step_times_of_this_bundle_on_such_a_gpu(
    folder: Path, keep: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, monkeypatch)
    assert measured.steps(plan, "H100")(POLICIES, (1, 2)) is None
    keep()
    keep()
    others: list[dict[str, Any]] = [
        {"gpu": "NVIDIA H200"},
        {"gpu": None},
        {"bundle": "1" * 64},
        {"backend": "tensorrt"},
        {"ranks": 2},
    ]
    for changed in others:
        keep(**changed)
    (folder / "step-times-x.json").write_text("{")
    os.utime(folder / "step-times-x.json", (99, 99))
    found = measured.steps(plan, "H100")(POLICIES, (1, 2))
    assert found is not None
    assert found.step(POLICIES[1], 2, 0) == pytest.approx(0.02), "the second, the last that is like this"
    assert measured.steps(plan, "B200")(POLICIES, (1, 2)) is None
    fewer = measured.steps(plan, "H100")(POLICIES[:1], (1,))
    assert fewer is not None
    assert fewer.seconds.keys() == {(POLICIES[0], 1), (POLICIES[0], 2)}
    assert measured.steps(plan, "H100")(POLICIES, (1, 2, 4)) is None, "a batch was not measured"
    (plan.recipe.folder / NAME).unlink()
    assert measured.steps(plan, "H100")(POLICIES, (1, 2)) is None, "a recipe has no step times"


def test_shares_are_of_all_products_together() -> None:
    """4,096 × 4,096 in bf16: 33.6 MB, 10.0 µs at 3.35 TB/s; at 512 rows 17.4 µs at 989 TFLOP/s."""
    shape, wide = (ProductShape(size, 4096, "bfloat16", "bfloat16", False, True) for size in (4096, 8192))
    narrow, small = ProductShape(4096, 4096, "float8_e4m3fn", "bfloat16", False, True), shape._replace(inputs=64)
    times: Times = {
        (shape, 1): {"plain": 20e-6, "padded": 30e-6},
        (wide, 1): {"plain": 40e-6, "kernel": 25e-6},
        (shape, 512): {"plain": 40e-6},
        (narrow, 1): {"plain": 10e-6},
        (small, 1): {"plain": 1e-6},
    }
    read, computed = 4096 * 4096 * 2 / 3.35e12, 2 * 512 * 4096 * 4096 / 989e12
    assert measured.shares_of(times, "H100") == pytest.approx(
        {
            ("16-bit weights", 1): 3 * read / 45e-6,
            ("16-bit weights", 512): computed / 40e-6,
            ("FP8 weights", 1): read / 2 / 10e-6,
        }
    )


def test_shares_of_a_gpu_are_read_from_its_newest_file(folder: Path) -> None:
    assert measured.shares("H100") == {}
    shape = ProductShape(4096, 4096, "bfloat16", "bfloat16", False, True)
    for number, (gpu, seconds) in enumerate([(H100, 40e-6), (H100, 20e-6), ("NVIDIA H200", 10e-6)]):
        path = folder / f"product-times-{number}.json"
        write(path, {(shape, 1): {"plain": seconds}}, gpu)
        os.utime(path, (number, number))
    newer = json.loads(path.read_text()) | {"more": 1}
    path.with_stem("product-times-9").write_text(json.dumps(newer))
    empty = json.loads(path.with_stem("product-times-1").read_text())
    empty["products"][0]["seconds"] = {}
    path.with_stem("product-times-8").write_text(json.dumps(empty))
    (found,) = measured.shares("H100").values()
    assert found == pytest.approx(4096 * 4096 * 2 / 3.35e12 / 20e-6)
    assert measured.shares("B200") == {}
    assert measured.is_kind("NVIDIA B200", "B200")
    assert not measured.is_kind("NVIDIA GH200 480GB", "H200")
