"""`d2sd trtllm`: the probe's table. Nothing of TensorRT-LLM is installed here but a fake."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from d2sd.cli.trtllm import trtllm
from d2sd.convert.trtllm.llm_args import D2SD, DFLASH, FOLDER, write_llm_args
from d2sd.recipe import load_recipe
from tests.convert.helpers import edit_json, write_project
from tests.d2sd.integrations.trtllm import fake
from tests.d2sd.integrations.trtllm.shop import models, write_bundle

#: See tests/d2sd/cli/test_main.py.
FLAGS = {"check": {"bundle"}}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(trtllm, [str(argument) for argument in arguments])


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    _, first, second = models(block_size=4)
    folder = write_bundle(tmp_path / "bundle", first, second)
    write_llm_args(folder / FOLDER, load_recipe(write_project(tmp_path / "project", precision="bf16")))
    return folder


def test_flags_are_frozen() -> None:
    assert trtllm.commands.keys() == FLAGS.keys()
    for name, flags in FLAGS.items():
        assert {flag for parameter in trtllm.commands[name].params for flag in parameter.opts} == flags


@pytest.mark.parametrize("command", [trtllm, *trtllm.commands.values()])
def test_every_help_has_an_example(command: click.Command) -> None:
    assert "      d2sd trtllm " in CliRunner().invoke(command, ["--help"]).output


def test_check_where_all_fits(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    fake.install(monkeypatch)
    done = invoke("check", bundle)
    assert done.exit_code == 0, done.output
    assert "NO  " not in done.output
    assert "DFlashWorker._refine_block_logits" in done.output
    for name in (DFLASH, D2SD):
        assert f"{name}: every key" in done.output
    assert "both drafters, one chain: would be registered" in done.output
    assert "tree: not available" in done.output


def test_check_of_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch, "1.5.0")
    done = invoke("check")
    assert done.exit_code == 1
    assert "NO  tensorrt_llm: 1.5.0" in done.output
    assert "expected: >=1.3.0rc22" in done.output
    assert "linear DFlash instead" in done.output


def test_check_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    done = invoke("check")
    assert done.exit_code == 1
    assert "cannot be imported" in done.output


def test_check_of_drafters_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    fake.install(monkeypatch)
    edit_json(bundle / "drafter_second" / "config.json", "rms_norm_eps", 0.5)
    done = invoke("check", bundle)
    assert done.exit_code == 1
    assert "differ in rms_norm_eps" in done.output


def test_check_of_no_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake.install(monkeypatch)
    done = invoke("check", tmp_path)
    assert done.exit_code == 2
    assert "no TensorRT-LLM arguments" in done.output
