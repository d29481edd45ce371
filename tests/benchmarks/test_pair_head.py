"""The study of pair heads, on a tiny bundle: its arms draft as they say, and what is measured is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.pair_head import DEPTH, MARGINALS, PATH, Arm, Study, main
from d2sd.build.pipeline import build
from d2sd.plugins.trees import Draft
from d2sd.policies import DrafterRole
from d2sd.recipe import load_recipe
from tests.d2sd.build.test_heads import project


@pytest.mark.slow
def test_arms_and_their_cells(tmp_path: Path) -> None:
    recipe = project(tmp_path / "project", "pair", "pair", precision="fp32")
    build(load_recipe(recipe), tmp_path / "bundle", validate=False)
    prompts = tmp_path / "words.jsonl"
    lines = [{"id": f"p{i}", "turns": [f"w{i} w{i + 20} w{i + 40}"]} for i in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    study = Study(tmp_path / "bundle", (prompts,), 2, 12, 2, calibrated=False, device="cpu", out=out)
    drafted = {}
    for scores in (MARGINALS, DEPTH, PATH):
        drafter = study.loaded(Arm(scores, "ddtree", 16)).drafters[DrafterRole.FIRST]
        tokens, logprob = torch.arange(16).expand(1, 1, 3, -1), torch.linspace(-2, -9, 16).expand(1, 1, 3, -1)
        hidden = torch.randn(1, 1, 3, 32, generator=torch.Generator().manual_seed(1))
        given = Draft(tokens, logprob), hidden, torch.tensor([[[7, 63, 63, 63]]]), torch.zeros(1), 16
        drafted[scores] = drafter.conditioned(*given) if drafter.pool else given[0]
    assert drafted[PATH].behind is not None
    assert drafted[DEPTH].behind is drafted[MARGINALS].behind is None
    assert torch.equal(drafted[DEPTH].logprob, drafted[PATH].logprob)

    room = study.head_room()["words"]
    assert room.keys() == {"1", "8", "16", "32"}
    assert room["1"][-1] <= room["8"][-1] <= room["32"][-1] <= 4
    arguments = [str(tmp_path / "bundle"), str(prompts), "--per-set", "2", "--max-new-tokens", "12", "--flight", "2"]
    arguments += ["--rows", "16", "--temperature", "1", "--only", "ladder", "--out", str(out)]
    said = CliRunner().invoke(main, arguments)
    assert said.exit_code == 0, said.output + repr(said.exception)
    assert "0 of 12 answers differ between arms." in said.stdout
    assert len(list((out / "cells").iterdir())) == 6
    again = CliRunner().invoke(main, arguments)
    assert again.stdout.split("answers differ")[0] == said.stdout.split("answers differ")[0]
