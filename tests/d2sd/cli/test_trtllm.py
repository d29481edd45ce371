"""`d2sd trtllm`: the probe's table, and arguments of other sizes. Nothing of TensorRT-LLM is installed here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from d2sd.build.pipeline import build
from d2sd.cli.trtllm import trtllm
from d2sd.convert.trtllm.llm_args import DFLASH, FOLDER, TREE
from d2sd.recipe import load_recipe
from tests.commands import passed, refused
from tests.convert.helpers import write_project
from tests.d2sd.integrations.trtllm.standin import modules as standin


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(trtllm, [str(argument) for argument in arguments])


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    build(load_recipe(write_project(tmp_path / "project", precision="bf16")), tmp_path / "bundle", validate=False)
    return tmp_path / "bundle"


def test_check_where_all_fits(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    standin.install(monkeypatch)
    done = passed(invoke("check", bundle, "--tree"))
    assert "NO  " not in done.output
    assert "Eagle3OneModelDynamicTreeWorker._forward_draft_loop" in done.output
    for name in (DFLASH, TREE):
        assert f"{name}: every key" in done.output
    assert "d2sd's tree: would be registered, not yet run on a GPU" in done.output
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    done = passed(invoke("check", bundle))
    assert f"{TREE}: every key" in done.output


def test_check_of_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    standin.install(monkeypatch, "1.5.0")
    done = invoke("check", "--tree")
    assert done.exit_code == 1
    assert "NO  tensorrt_llm: 1.5.0" in done.output
    assert "expected: >=1.3.0rc27" in done.output
    assert "d2sd's tree: no: tensorrt_llm: 1.5.0" in done.output
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    done = invoke("check", "--tree")
    assert done.exit_code == 1
    assert "cannot be imported" in done.output
    refused(invoke("check", tmp_path), "no TensorRT-LLM arguments")


@pytest.mark.parametrize(
    "text", ["[1]", "a: &a [*a]", "max_batch_size: 9_" + "9" * 5000, "max_batch_size: 2026-99-99"], ids=range(4)
)
def test_check_of_arguments_that_are_no_mapping_or_out_of_bounds(bundle: Path, text: str) -> None:
    """Beyond the bounds of `test_recipe.py` YAML 1.1 has numbers and dates that are none."""
    (bundle / FOLDER / TREE).write_text(text, "utf-8")
    refused(invoke("check", bundle), TREE)


def test_check_of_arguments_in_yaml_1_1(bundle: Path) -> None:
    """TensorRT-LLM reads `off` as false."""
    path = bundle / FOLDER / TREE
    path.write_text(path.read_text("utf-8").replace("enable_block_reuse: false", "enable_block_reuse: off"), "utf-8")
    assert invoke("check", bundle).exit_code == 0


@pytest.mark.parametrize("out", ["missing/tree.yaml", "."])
def test_arguments_to_no_file(bundle: Path, tmp_path: Path, out: str) -> None:
    refused(invoke("args", bundle, "-o", tmp_path / out), str(tmp_path))


def test_arguments_of_another_size(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "tree8.yaml"
    done = passed(invoke("args", bundle, "--nodes", 8, "--max-batch", 64, "-o", out))
    assert "hybrid+lookup of 8 rows" in done.output
    values = yaml.safe_load(out.read_text())
    assert values["max_batch_size"] == 64
    assert values["speculative_config"]["max_total_draft_tokens"] == 7


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--nodes", 3], "at least a path"), (["--nodes", 2000], "out of range"), (["--nodes", "many"], "not a valid")],
)
def test_arguments_of_no_tree(bundle: Path, tmp_path: Path, arguments: list[object], told: str) -> None:
    refused(invoke("args", bundle, *arguments, "-o", tmp_path / "tree.yaml"), told)
    assert not (tmp_path / "tree.yaml").exists()


def test_arguments_of_a_bundle_in_fp32(tmp_path: Path) -> None:
    build(load_recipe(write_project(tmp_path / "project", precision="fp32")), tmp_path / "bundle", validate=False)
    refused(invoke("args", tmp_path / "bundle", "-o", tmp_path / "tree.yaml"), "16-bit")
