"""What a bundle has for other engines: files that start them with its target and its first drafter."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from d2sd.convert import kinds
from d2sd.convert.elsewhere import ENGINES, FOLDER, write_elsewhere
from d2sd.recipe import load_recipe
from tests.convert.helpers import write_project
from tests.tiny import tiny_decoder, tiny_drafter


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The parts of a bundle that are named."""
    drafter = tiny_drafter(tiny_decoder().config, block_size=4)
    folder = tmp_path / "bundle"
    kinds.DFLASH.write(folder / "drafter_first", drafter.config, drafter.state_dict())
    (folder / "target").mkdir()
    write_elsewhere(folder / FOLDER, load_recipe(write_project(tmp_path / "project", precision="bf16")))
    return folder


def test_every_file_says_how_to_use_it(bundle: Path) -> None:
    assert {path.name for path in (bundle / FOLDER).iterdir()} == {engine.file for engine in ENGINES.values()}
    for name, engine in ENGINES.items():
        head = (bundle / FOLDER / engine.file).read_text().splitlines()[:2]
        assert head == [
            f"# {name} with this bundle's first drafter. Not yet run. From the bundle's folder:",
            f"#   {engine.command}",
        ]


def test_vllm(bundle: Path) -> None:
    values = yaml.safe_load((bundle / FOLDER / "vllm.yaml").read_text())
    speculative = json.loads(values.pop("speculative-config"))
    assert speculative == {"method": "dflash", "model": "drafter_first", "num_speculative_tokens": 3}
    assert (bundle / speculative["model"] / "config.json").is_file()
    assert values == {"dtype": "bfloat16", "max-model-len": 64, "max-num-seqs": 2}


def test_sglang(bundle: Path) -> None:
    values = yaml.safe_load((bundle / FOLDER / "sglang.yaml").read_text())
    assert (bundle / values["model-path"]).is_dir()
    assert (bundle / values["speculative-draft-model-path"] / "config.json").is_file()
    assert values["speculative-algorithm"] == "DFLASH"
    assert values["speculative-dflash-block-size"] == 4


def test_edge_llm(bundle: Path, tmp_path: Path) -> None:
    """Its commands are called in order, with folders of the bundle."""
    log = tmp_path / "log"
    for name in ("tensorrt-edgellm-export", "llm_build", "llm_inference"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\n')
        (tmp_path / name).chmod(0o755)
    subprocess.run(
        ["sh", f"{FOLDER}/edge_llm.sh", "in.json", "out.json"],
        cwd=bundle,
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        check=True,
    )
    export, base, draft, run = log.read_text().splitlines()
    assert export.split()[1:4] == ["target", "edge_llm/onnx", "--dflash-base"]
    assert export.split()[4:] == ["--dflash-draft", "--dflash-draft-dir", "drafter_first"]
    assert "--specBase" in base.split()
    assert "--specDraft" in draft.split()
    assert "--inputFile in.json --outputFile out.json --specDecode --specDraftTopK 8" in run
    assert "--specVerifySize 16 --dflashBlockSize 4" in run
