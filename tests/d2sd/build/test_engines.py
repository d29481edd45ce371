"""Engines as part of a bundle: layout, resuming, and requests that cannot be built."""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from d2sd import tensorrt_env as tensorrt
from d2sd.build import engines as stages
from d2sd.build.pipeline import build
from d2sd.build.plan import make_plan
from d2sd.bundle.load import load_bundle
from d2sd.convert.engines.build import Job, Report
from d2sd.convert.onnx import export
from d2sd.errors import BuildError, RecipeError
from d2sd.recipe import load_recipe
from tests.convert.helpers import add_flex, edit_yaml, write_project
from tests.d2sd.build.helpers import Killed, killed_after, run
from tests.tiny import tiny_decoder

pytest.importorskip("tensorrt_rtx", reason="the extra engines is not installed")
ROOT = Path(__file__).parents[3]
MODELS = ("drafter_first", "drafter_second", "target")
GRAPHS = ["target.onnx", "drafter_first.onnx", "drafter_second.onnx"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Qwen3 with heads of 16, in fp16, for every GPU and for one."""
    target = tiny_decoder("qwen3", layers=2, head_dim=16)
    return write_project(tmp_path / "project", target, precision="fp16", engines={"compute": ["portable", "sm89"]})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs and engines that are a few bytes each; returns what is made, as it is made."""
    made: list[str] = []

    def graph(*arguments: Any) -> None:
        file = arguments[-1]
        made.append(file.name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"graph {file.name}")

    def engines(jobs: list[Job], *rest: Any, **options: Any) -> list[Report]:
        made.append(jobs[0].compute)
        for job in jobs:
            Path(job.engine).write_text(f"engine {len(made)}")  # no two alike, as TensorRT's own
        return [Report("tensorrt-rtx", "1", job.compute, {"PLUGIN_V3": 2}, 2, 8) for job in jobs]

    monkeypatch.setattr(stages, "export_target", graph)
    monkeypatch.setattr(stages, "export_drafter", graph)
    monkeypatch.setattr(stages, "build_engines", engines)
    return made


@pytest.mark.engines
@pytest.mark.export
@pytest.mark.e2e
def test_a_bundle_with_engines(recipe: Path, tmp_path: Path) -> None:
    found = run(recipe, tmp_path / "whole")
    graphs = [f"onnx/{model}.onnx{part}" for model in MODELS for part in ("", ".data")]
    engines = [f"engines/{compute}/{model}.engine" for compute in ("portable", "sm89") for model in MODELS]
    assert {*graphs, *engines} == {name for name in found if name.startswith(("onnx/", "engines/"))}
    manifest = load_bundle(tmp_path / "whole").manifest
    assert manifest.engines is not None
    assert manifest.engines.plugins == {"target": 2, "drafter_first": 2, "drafter_second": 2}
    assert manifest.engines.compute == ("portable", "sm89")
    assert manifest.versions["onnxscript"] == importlib.metadata.version("onnxscript")
    assert manifest.engines.profiles["target"][0]["embedded"][2] == [2, 16, 32]
    assert {*graphs, *engines} <= manifest.files.keys()
    for name, content in found.items():
        assert str(tmp_path).encode() not in content, name


@pytest.mark.engines
@pytest.mark.export
@pytest.mark.e2e
def test_an_engine_of_a_head(recipe: Path, tmp_path: Path) -> None:
    """The engine runs the head's layers over the target's pages."""
    add_flex(recipe)
    edit_yaml(recipe, "engines.compute", ["portable"])
    run(recipe, tmp_path / "whole")
    manifest = load_bundle(tmp_path / "whole").manifest
    assert manifest.engines is not None
    assert manifest.engines.plugins == {"target": 2, "drafter_first": 1}


def test_a_build_that_stops_after_any_stage_goes_on_behind_it(recipe: Path, tmp_path: Path, quick: list[str]) -> None:
    whole = run(recipe, tmp_path / "whole")
    once = list(quick)
    assert once == [*GRAPHS, "portable", "sm89"]
    quick.clear()
    for last in ("onnx", "engines/portable", "engines/sm89"):
        with pytest.raises(Killed):
            run(recipe, tmp_path / "again", finished=killed_after(last))
        assert not (tmp_path / "again").exists()
    assert run(recipe, tmp_path / "again") == whole
    assert quick == once, "a finished stage is not run again"


def test_engines_that_a_recipe_no_longer_names_are_dropped(recipe: Path, tmp_path: Path, quick: list[str]) -> None:
    with pytest.raises(Killed):
        run(recipe, tmp_path / "out", finished=killed_after("engines/sm89"))
    edit_yaml(recipe, "engines.compute", ["portable"])
    found = run(recipe, tmp_path / "out")
    assert {name.split("/")[1] for name in found if name.startswith("engines/")} == {"portable"}
    assert quick.count("portable") == 1
    edit_yaml(recipe, "engines", None)
    with pytest.raises(Killed):
        run(recipe, tmp_path / "plain", finished=killed_after("drafter_second"))
    assert not [name for name in run(recipe, tmp_path / "plain") if name.startswith(("onnx", "engines"))]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no capability": ({"engines": {"compute": []}}, "at least 1"),
    "one that is not built": ({"engines": {"compute": ["sm90"]}}, r"engines\.compute\.0"),
    "one twice": ({"engines": {"compute": ["sm89", "sm89"]}}, "sm89 twice"),
    "native of TensorRT-RTX": ({"engines": {"compute": ["native"]}}, "for tensorrt-rtx, which builds all but native"),
    "sm89 of classic TensorRT": (
        {"engines": {"compute": ["sm89"], "builder": "tensorrt"}},
        "for tensorrt, which builds native alone",
    ),
    "FP8 without FP8": ({"engines": {"compute": ["sm89", "sm86"]}, "fp8": {}}, r"engines\.compute sm86 has no FP8"),
}


@pytest.mark.parametrize(("changes", "told"), WRONG.values(), ids=WRONG.keys())
def test_what_a_recipe_asks_in_vain(recipe: Path, changes: dict[str, Any], told: str) -> None:
    for key, value in changes.items():
        edit_yaml(recipe, key, value)
    with pytest.raises(RecipeError, match=told):
        load_recipe(recipe)


def test_heads_that_kernels_do_not_take_are_seen_in_the_plan(tmp_path: Path) -> None:
    recipe = write_project(tmp_path / "project", engines={"compute": ["portable"]})
    with pytest.raises(RecipeError, match=r"head size[\s\S]*head_dim[\s\S]*found: 8"):
        make_plan(load_recipe(recipe))


def test_pages_that_tensorrt_does_not_align_are_seen_in_the_plan(recipe: Path) -> None:
    for page_size, bytes_of_it in ((2, 128), (1, 64)):
        edit_yaml(recipe, "limits.page_size", page_size)
        with pytest.raises(RecipeError, match=rf"limits\.page_size[\s\S]*{bytes_of_it} bytes[\s\S]*256 bytes"):
            make_plan(load_recipe(recipe))
    edit_yaml(recipe, "limits.page_size", 4)
    make_plan(load_recipe(recipe))


@pytest.mark.parametrize("missing", ["tensorrt_rtx", "onnxscript", "onnxruntime"])
def test_what_is_not_installed_is_named_before_anything_is_written(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for place in (tensorrt, export):
        monkeypatch.setattr(place, "find_spec", lambda name: None if name == missing else find_spec(name))
    (tmp_path / "out").mkdir()
    with pytest.raises(BuildError, match=r"pip install 'onnx>="):
        run(recipe, tmp_path / "out" / "bundle")
    assert list((tmp_path / "out").iterdir()) == []


def test_another_version_of_the_exporter_writes_the_graphs_again(
    recipe: Path, tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for newer in ("", "", ".1"):
        monkeypatch.setattr(stages, "version", lambda tool, newer=newer: importlib.metadata.version(tool) + newer)
        with pytest.raises(Killed):
            run(recipe, tmp_path / "out", finished=killed_after("onnx"))
    assert quick == GRAPHS * 2


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(600)
def test_the_recipe_of_a_gpu_server_builds(recipe: Path, tmp_path: Path) -> None:
    """The shipped recipe, of a smaller target and smaller drafters: FP8, engines of all models, a share of memory."""
    pytest.importorskip("modelopt", reason="the extra fp8 is not installed")
    small = yaml.safe_load(recipe.read_text())
    shipped = yaml.safe_load((ROOT / "recipes" / "smollm2-135m-fp8.yaml").read_text())
    assert (shipped["engines"], shipped["limits"]["kv_memory"]) == ({"compute": ["portable"]}, 0.8)
    changes = {key: small[key] for key in ("target", "drafters", "tree")} | {"sampling": {"max_new_tokens": 8}}
    changes["tree"]["policy"] = "auto"
    changes["limits"] = shipped["limits"] | {"max_context": 256}
    changes["fp8"] = shipped["fp8"] | {"count": 2, "tokens": 8}
    recipe.write_text(yaml.safe_dump(shipped | changes))
    manifest = build(load_recipe(recipe), tmp_path / "bundle")
    assert manifest.engines is not None
    assert set(manifest.engines.plugins) == {"target", "drafter_first", "drafter_second"}
    assert "fp8" in manifest.checks
