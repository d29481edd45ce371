"""Engines built on a CPU: of the plugins, of the functions in their place, in FP8; and what is refused, by name."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd import tensorrt_env as tensorrt
from d2sd.convert.engines import build as build_module
from d2sd.convert.engines.build import Job, Report, build_engine, build_engines, configure, unversioned_library
from d2sd.convert.engines.profiles import make_profiles
from d2sd.convert.onnx.export import export_target
from d2sd.errors import BuildError
from d2sd.modeling.config import DecoderConfig, DrafterConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from tests.convert.engines.test_profiles import RECIPE
from tests.convert.exported import PAGE, Exported, ExportOnce, tiny_pair
from tests.modeling.test_fp8 import fp8_decoder

pytest.importorskip("tensorrt_rtx", reason="the extra engines is not installed")
#: Of the shared pair of Qwen3.
pytestmark = pytest.mark.slow
TARGET, DRAFTER = (model.config for model in tiny_pair("qwen3", torch.float16))
CONFIGS: dict[str, DecoderConfig | DrafterConfig] = {"target": TARGET, "drafter": DRAFTER}


def linked(folder: Path, exported: Exported) -> Path:
    """Links to the graphs, so engines are written next to them."""
    for file in exported.folder.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def graphs(export_once: ExportOnce, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a drafter with heads of 16."""
    return linked(tmp_path_factory.mktemp("graphs"), export_once("qwen3", torch.float16))


def job(folder: Path, graph: str, config: DecoderConfig | DrafterConfig, **changes: Any) -> Job:
    """An engine of one profile, which holds every batch."""
    values: dict[str, Any] = {
        "graph": str(folder / f"{graph}.onnx"),
        "engine": str(folder / f"{graph}.engine"),
        "report": str(folder / f"{graph}.json"),
        "builder": "tensorrt-rtx",
        "compute": "portable",
        "profiles": make_profiles(RECIPE, "tensorrt-rtx", config)[:1],
    }
    return Job(**values | changes)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("graph", "compute"),
    [
        pytest.param(graph, compute, marks=[] if (graph == "target") == (compute == "portable") else pytest.mark.full)
        for graph in CONFIGS
        for compute in ("portable", "sm89")
    ],
)
def test_every_attention_becomes_our_plugin(graphs: Path, tmp_path: Path, graph: str, compute: str) -> None:
    layers = CONFIGS[graph].body.num_layers
    (report,) = build_engines([job(graphs, graph, CONFIGS[graph], compute=compute)], tmp_path)
    assert (report.plugins, report.layers["PLUGIN_V3"], report.compute) == (layers, layers, compute)
    assert "SOFTMAX" not in report.layers, "no attention was built from the function"
    assert (graphs / f"{graph}.engine").stat().st_size == report.bytes > 0


@pytest.mark.engines
@pytest.mark.parametrize("graph", CONFIGS)
def test_without_plugins_the_functions_are_built(graphs: Path, graph: str) -> None:
    """In this process: no plugin is asked for, so the library's name does not matter."""
    report = build_engine(job(graphs, graph, CONFIGS[graph], plugins=False))
    assert (report.plugins, report.layers["SOFTMAX"]) == (0, CONFIGS[graph].body.num_layers)


@pytest.mark.full
@pytest.mark.engines
def test_windows_and_sinks_are_inputs_of_the_plugin(export_once: ExportOnce, tmp_path: Path) -> None:
    exported = export_once("qwen3", torch.float32, windows=True)
    folder = linked(tmp_path, exported)
    models: dict[str, Decoder | Drafter] = {"target": exported.target, "drafter": exported.drafter}
    for graph, model in models.items():
        layers = model.config.body.num_layers
        (report,) = build_engines([job(folder, graph, model.config)], tmp_path / f"{graph} scratch")
        assert (report.plugins, report.layers.get("SOFTMAX", 0)) == (layers, 0)
        without = build_engine(job(folder, graph, model.config, plugins=False))
        assert (without.plugins, without.layers["SOFTMAX"]) == (0, layers)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.engines
@pytest.mark.export
def test_fp8_is_built_where_there_is_fp8(tmp_path: Path) -> None:
    target = fp8_decoder(cache=False, head_dim=16, dtype=torch.float16)
    export_target(target, (), PAGE, tmp_path / "fp8.onnx")
    jobs = [job(tmp_path, "fp8", target.config, compute=compute) for compute in ("sm120", "sm89")]
    for report in build_engines(jobs, tmp_path / "scratch", at_once=2):
        assert report.plugins == 3
        assert report.layers["QUANTIZE"] == 3 * 4, "inputs that q, k and v share, or gate and up, are rounded once"
        assert report.layers["DEQUANTIZE"] == 3 * (4 + 7)
    with pytest.raises(BuildError, match="cannot be built"):
        build_engines([job(tmp_path, "fp8", target.config, compute="sm86")], tmp_path / "scratch")


def test_fp32_stays_fp32_and_runs_can_be_recorded(graphs: Path) -> None:
    trt = tensorrt.find_tensorrt("tensorrt-rtx")
    builder, flags = trt.module.Builder(tensorrt.ErrorLog(trt.module).log), trt.module.BuilderFlag
    assert builder.create_builder_config().get_flag(flags.TF32), "on by default"
    config = configure(trt, builder, job(graphs, "target", TARGET))
    assert not config.get_flag(flags.TF32)
    assert config.get_flag(flags.REQUIRE_USER_ALLOCATION)


@pytest.mark.engines
def test_heads_that_the_kernels_do_not_take(export_once: ExportOnce, tmp_path: Path) -> None:
    exported = export_once("qwen2", torch.float32)
    for file in exported.folder.glob("target.*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(BuildError, match=r"head size[\s\S]*found: 8"):
        build_engines([job(tmp_path, "target", exported.target.config)], tmp_path / "scratch")


def test_what_a_builder_cannot_build(graphs: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"sm90[\s\S]*sm89"):
        build_engine(job(graphs, "target", TARGET, compute="sm90"))
    (tmp_path / "target.onnx").write_bytes(b"nothing of the kind")
    with pytest.raises(BuildError, match="cannot parse"):
        build_engine(job(tmp_path, "target", TARGET, plugins=False))
    (tmp_path / "r").write_text("{}")  # an earlier run's report is not this one's
    doomed = job(graphs, "target", TARGET, engine=str(tmp_path / "nowhere" / "x"), report=str(tmp_path / "r"))
    with pytest.raises(BuildError, match=r"builder crashed[\s\S]*No such file"):
        build_engines([doomed], tmp_path / "scratch")


@pytest.mark.parametrize(("name", "fix"), [("tensorrt", "TensorRT 10.14"), ("tensorrt-rtx", "'tensorrt-rtx<")])
def test_a_builder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: Any, fix: str) -> None:
    monkeypatch.setattr(tensorrt, "find_spec", lambda module: None)
    with pytest.raises(BuildError, match=fix):
        tensorrt.find_tensorrt(name)


def test_a_builder_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(tensorrt, "import_module", broken)
    with pytest.raises(BuildError, match=r"cannot be imported[\s\S]*libnvinfer"):
        tensorrt.find_tensorrt("tensorrt-rtx")


def test_nothing_is_begun_behind_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[str] = []

    def fails(job: Job, folder: Path) -> Report:
        begun.append(folder.name)
        time.sleep(0.1)  # a builder takes longer, and whoever waits for it wakes meanwhile
        raise BuildError("The engine cannot be built.", where=job.graph)

    monkeypatch.setattr(build_module, "_build", fails)
    with pytest.raises(BuildError, match="cannot be built"):
        build_engines([job(tmp_path, "target", TARGET)] * 9, tmp_path)
    assert begun[0] == "0"
    assert len(begun) < 9, "a few may begin while the failure is noticed"


def test_the_librarys_other_name(tmp_path: Path) -> None:
    for _ in range(2):  # a second build finds the first one's link
        assert unversioned_library("tensorrt-rtx", tmp_path / "lib") == tmp_path / "lib"
    assert (tmp_path / "lib" / "libtensorrt_rtx.so").resolve().name == "libtensorrt_rtx.so.1"
    assert unversioned_library("tensorrt", tmp_path / "other") is None
