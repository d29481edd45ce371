"""`d2sd train` makes an EAGLE-3 or a FlexDraft head from the same data, which a recipe takes; resumed, it is the same
to the byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.calibration import load_calibration
from d2sd.convert.checkpoint.target import load_target
from d2sd.convert.kinds.eagle3 import KIND as EAGLE3
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

EAGLE = {"kind": "eagle3", "layers": 1, "block_size": 4, "mask_token_id": 63, "target_layer_ids": [0, 1]}
FLEX = {"layers": 1, "block_size": 4, "calibration_size": 8, "draft_vocab_size": 12}
#: What a recipe of each head changes.
CHANGES: dict[str, dict[str, Any]] = {
    "eagle3": {"drafter": EAGLE | {"draft_vocab_size": 12}, "second": ...},
    "flex": {"drafter": ..., "first": ..., "second": ..., "flex": SETTINGS | {"head": FLEX}},
}


def project_of(head: str, tmp_path: Path) -> Path:
    folder = write_training(tmp_path / "project")
    for key, value in CHANGES[head].items():
        edit(folder, key, value)
    return folder


def interrupted_and_trained(project: Path) -> dict[str, bytes]:
    """The files of a training that was interrupted in its fourth step, and resumed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_update", nth_time(Trainer._update, 4))
        assert train(project).exit_code != 0
    files = trained(project)
    assert logged(project, "first") == LOGGED
    assert json.loads(files["evaluation.json"])["methods"]["chain"]["rows"] == 4
    return files


@pytest.mark.slow
def test_an_eagle3_head_is_trained_resumed_and_built(tmp_path: Path) -> None:
    project = project_of("eagle3", tmp_path)
    files = interrupted_and_trained(project)
    head = EAGLE3.load(project / "out" / "first", torch.float32)
    assert (head.config.drafts, len(head.config.draft_vocabulary or ())) == (3, 12)
    selector = selector_of_first(project)
    assert {policy.name for policy in selector.policies} >= {"off", "chain", "ddtree"}
    assert trained(project) == files


@pytest.mark.slow
def test_a_flexdraft_head_is_trained_resumed_and_built(tmp_path: Path) -> None:
    project = project_of("flex", tmp_path)
    files = interrupted_and_trained(project)
    assert sorted(files) == [
        MARKER,
        "calibration.json",
        "curves.png",
        "evaluation.json",
        *(f"first/{name}" for name in ("config.json", "draft_vocab.json", "model.safetensors")),
    ]
    found = json.loads(files["evaluation.json"])
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


@pytest.mark.parametrize(
    ("head", "key", "value"), [("eagle3", "drafter.target_layer_ids", [0, 3]), ("flex", "flex.head.layers", 3)]
)
def test_the_plan_knows_it(head: str, key: str, value: object, tmp_path: Path) -> None:
    project = project_of(head, tmp_path)
    told = passed(train(project, "--plan")).output
    assert "first drafter   0 of 4 steps" in told
    assert "calibration     3 held-out prompts" in told
    edit(project, key, value)
    refused(train(project, "--plan"), key)
