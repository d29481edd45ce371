"""A recipe with FP8, from the command to the text: what is in the bundle, what was measured, what fails it."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from d2sd.build import fp8 as fp8_build
from d2sd.build import fp8_scales as calibrate_fp8
from d2sd.cli.main import main
from d2sd.convert.checkpoint.own_files import FP8_INPUTS
from d2sd.convert.kinds import DFLASH
from d2sd.modeling.fp8 import Fp8Linear
from tests.commands import passed, refused
from tests.convert.helpers import add_flex, tree_bytes, write_project

pytest.importorskip("modelopt", reason="the extra fp8 is not installed")
#: Prompts of the words that the tiny tokenizer knows.
pytestmark = pytest.mark.slow
#: Folder, layers, and FP8 weights of a layer.
DRAFTERS = "drafter_first", "drafter_second"
PARTS = ("target", 3, 7), ("drafter_first", 2, 4), ("drafter_second", 2, 4)
WORDS = [" ".join(f"w{(7 * i + 3 * j) % 60}" for j in range(6)) for i in range(8)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    lines = [json.dumps({"id": str(i), "turns": [words]}) for i, words in enumerate(WORDS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    fp8 = {"prompts": "prompts.jsonl", "count": 8, "tokens": 12, "kv": True}
    recipe = write_project(folder, precision="bf16", fp8=fp8, checks={"prompts": "prompts.jsonl", "tokens": 8})
    return recipe


@pytest.fixture(scope="module")
def of_head(project: Path) -> Path:
    """The bundle of the same target and a FlexDraft head."""
    recipe = project.with_name("head.yaml")
    recipe.write_text(project.read_text())
    add_flex(recipe, policy="auto")
    out = project.parent / "of-head"
    assert build(recipe, out).exit_code == 0
    return out


@pytest.fixture(scope="module")
def bundle(project: Path) -> Path:
    out = project.parent / "bundle"
    assert build(project, out).exit_code == 0
    return out


def build(recipe: Path, out: Path, *overrides: str) -> Result:
    sets = [part for override in overrides for part in ("--set", override)]
    return CliRunner().invoke(main, ["build", str(recipe), "--out", str(out), *sets], catch_exceptions=False)


def checks(bundle: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())["checks"]["fp8"]
    return found


def test_every_model_is_fp8_where_it_should_be(bundle: Path) -> None:
    for folder, layers, kinds in PARTS:
        tensors = load_file(bundle / folder / "model.safetensors")
        fp8 = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
        assert len(fp8) == layers * kinds
        assert all(f"{name}_scale" in tensors for name in fp8)
        described = json.loads((bundle / folder / "hf_quant_config.json").read_text())["quantization"]
        assert described["quant_algo"] == "FP8"
        assert (described["kv_cache_quant_algo"] == "FP8") == (folder == "target")
        inline = json.loads((bundle / folder / "config.json").read_text())["quantization_config"]
        assert inline["ignore"] == described["exclude_modules"]
        assert (bundle / folder / FP8_INPUTS).exists() == (folder in DRAFTERS)
    for folder in DRAFTERS:
        drafter = DFLASH.load(bundle / folder, torch.bfloat16)
        assert sum(isinstance(layer, Fp8Linear) for layer in drafter.modules()) == 2 * 7 + 1


def test_what_changed_is_measured(bundle: Path) -> None:
    found = checks(bundle)
    before, after = found["target"]["perplexity"]
    assert before > 1
    assert after != before
    assert found["target"]["perplexity_change"] == pytest.approx(after / before - 1, abs=1e-4)
    assert found["target"]["divergence"] > 0
    assert 0 < found["target"]["same_greedy_token"] <= 1
    assert 8 <= found["target"]["answer_tokens"] <= 8 * 12
    assert found["target"]["prompt_tokens"] > 8
    for policy in ("chain", "hybrid"):
        assert all(tau >= 1 for tau in found["tau"][policy]["tau"])
        assert 0 <= found["tau"][policy]["equal_answers"] <= 8


def test_a_head_is_fp8_too(of_head: Path) -> None:
    tensors = load_file(of_head / "drafter_first" / "model.safetensors")
    fp8 = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(fp8) == 4
    assert all(f"{name}_scale" in tensors for name in fp8)
    for policy in ("chain", "ddtree"):
        assert all(tau >= 1 for tau in checks(of_head)["tau"][policy]["tau"])


def test_the_bundle_generates_and_shows_itself(bundle: Path, of_head: Path) -> None:
    for path, policy in ((bundle, "hybrid"), (bundle, "off"), (of_head, "chain")):
        passed(CliRunner().invoke(main, ["generate", str(path), "-p", WORDS[0], "--policy", policy, "--raw"]))
    shown = passed(CliRunner().invoke(main, ["inspect", str(bundle)]))
    assert "FP8" in shown.output
    assert "perplexity" in shown.output


def test_what_cannot_be_is_named(bundle: Path, tmp_path: Path, project: Path) -> None:
    refused(
        CliRunner().invoke(main, ["calibrate", str(bundle), "--out", str(tmp_path / "calibration.json")]),
        "calibrate a bundle without fp8",
    )
    refused(build(project, tmp_path / "out", "precision=fp32"), "fp8 computes in 16 bits")
    refused(build(project, tmp_path / "out", "fp8.prompts=nowhere.jsonl"), "nowhere.jsonl")


def test_equal_inputs_give_equal_bytes(project: Path, bundle: Path, tmp_path: Path) -> None:
    assert build(project, tmp_path / "again").exit_code == 0
    assert tree_bytes(tmp_path / "again") == tree_bytes(bundle)


@pytest.mark.parametrize(
    ("bound", "named"), [("max_perplexity_rise", "perplexity rises"), ("max_tau_drop", "Tokens a step")]
)
def test_a_bound_fails_the_build(
    project: Path, tmp_path: Path, bound: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = calibrate_fp8.quantize_target

    def wrong(modelopt: Any, source: Path, directory: Path, *args: Any, **options: Any) -> None:
        real(modelopt, source, directory, *args, **options)
        tensors = load_file(directory / "model.safetensors")
        narrow = {name: torch.tensor(1e-5) for name in tensors if name.endswith("input_scale")}
        save_file(tensors | narrow, directory / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(fp8_build, "quantize_target", wrong)
    monkeypatch.setattr("d2sd.build.pipeline.check_bundle", lambda bundle, progress: {})
    taus = cycle([3.0, 2.9])  # random drafters lose nothing
    monkeypatch.setattr("d2sd.build.fp8.mean_tau", lambda stats: next(taus))
    refused(build(project, tmp_path / "out", f"fp8.{bound}=0.01", "fp8.kv=false"), named, f"fp8.{bound}")
    assert not (tmp_path / "out").exists()


def test_parts_can_stay_wide(project: Path, tmp_path: Path) -> None:
    passed(build(project, tmp_path / "out", "fp8.target=false"))
    assert not (tmp_path / "out" / "target" / "hf_quant_config.json").exists()
    assert (tmp_path / "out" / "drafter_first" / "hf_quant_config.json").exists()
    assert "target" not in checks(tmp_path / "out")


def test_an_fp8_source_is_served_as_it_is_and_not_quantized_twice(project: Path, bundle: Path, tmp_path: Path) -> None:
    paths = {"target": "target", "drafters.first": "drafter_first", "drafters.second": "drafter_second"}
    sources = [f"{key}.path={bundle / folder}" for key, folder in paths.items()]
    refused(build(project, tmp_path / "twice", *sources), "FP8 already")
    assert build(project, tmp_path / "once", *sources, "fp8=null").exit_code == 0
    for folder, _, _ in PARTS:
        for file in (f"{folder}/model.safetensors", *([f"{folder}/{FP8_INPUTS}"] if folder in DRAFTERS else [])):
            assert (tmp_path / "once" / file).read_bytes() == (bundle / file).read_bytes()
