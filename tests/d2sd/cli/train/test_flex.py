"""`d2sd train` makes a FlexDraft head from the same data, which a recipe takes; resumed, it is the same to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from d2sd.calibration import load_calibration
from d2sd.convert.checkpoint.target import load_target
from d2sd.convert.kinds.flexdraft import KIND as FLEXDRAFT
from d2sd.io import MARKER
from d2sd.runtime.policy_selector import forecast_gain
from d2sd.runtime.speculation.policy import Chain, FlexParallel
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.finish import weights_digest
from tests.commands import passed, refused, run_cli
from tests.convert.helpers import edit_json
from tests.d2sd.cli.train.helpers import (
    LOGGED,
    SETTINGS,
    edit,
    logged,
    nth_time,
    selector_of_first,
    train,
    trained,
    write_training,
)

HEAD = {"layers": 1, "block_size": 4, "calibration_size": 8, "draft_vocab_size": 12}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = write_training(tmp_path / "project")
    for key, value in {"drafter": ..., "first": ..., "second": ..., "flex": SETTINGS | {"head": HEAD}}.items():
        edit(folder, key, value)
    return folder


@pytest.mark.slow
def test_a_head_is_trained_resumed_and_built(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", nth_time(Trainer._update, 4))
        assert train(project).exit_code != 0
    files = trained(project)
    assert sorted(files) == [
        MARKER,
        "calibration.json",
        "curves.png",
        "evaluation.json",
        *(f"first/{name}" for name in ("config.json", "draft_vocab.json", "model.safetensors")),
    ]
    assert logged(project, "first") == LOGGED
    found = json.loads(files["evaluation.json"])
    assert found["methods"]["chain"]["rows"] == 4
    target = load_target(project / "work" / "target" / "target", torch.float32)
    assert found["target"] == {"sha256 before and after training": weights_digest(target)}
    head = FLEXDRAFT.load(project / "out" / "first", torch.float32)
    assert head.config.draft_vocabulary is not None
    assert len(head.config.draft_vocabulary) == 12
    assert head.calibration.outer.weight.any()
    selector = selector_of_first(project)
    assert {policy.name for policy in selector.policies} == {"off", "lookup", "chain", "ddtree", "flex_parallel"}
    calibration = load_calibration(project / "out" / "calibration.json")
    for warm in calibration.slope:
        assert warm[1] == [[1.0, 1.0]] * 3
        assert warm[0] != warm[1]
    assert [name for name in calibration.report if "second" in name] == []
    error = calibration.report["calibration error of first at T = 0, after"]
    assert error < calibration.report["calibration error of first at T = 0, before"]
    forecast = calibration.tau["0"]["chain"]
    assert all(tree >= chain for chain, tree in zip(forecast, calibration.tau["0"]["ddtree"], strict=True))
    drafts = [forecast_gain(selector.forecast, policy, 0.0).drafts for policy in (Chain(4), FlexParallel(4))]
    assert drafts == [forecast[3] - 1] * 2
    assert trained(project) == files

    edit_json(project / "out" / "calibration.json", "drafters.first", "0" * 16)
    refused(run_cli("build", project / "bundle.yaml", "--out", project / "other"), "another first drafter")
    assert not (project / "other").exists()


def test_the_plan_knows_it(project: Path) -> None:
    result = passed(train(project, "--plan"))
    assert "first drafter   0 of 4 steps" in result.output
    assert "calibration     3 held-out prompts" in result.output
    edit(project, "flex.head.layers", 3)
    result = train(project, "--plan")
    assert result.exit_code != 0
    assert "flex.head.layers" in result.output + repr(result.exception)
