"""`d2sd train` makes an EAGLE-3 head from the same data, which a recipe takes; resumed, it is the same to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from d2sd.convert.kinds.eagle3 import KIND as EAGLE3
from d2sd.train.loop import Trainer
from tests.commands import passed
from tests.d2sd.cli.train.helpers import (
    LOGGED,
    edit,
    logged,
    nth_time,
    selector_of_first,
    train,
    trained,
    write_training,
)

HEAD = {"kind": "eagle3", "layers": 1, "block_size": 4, "mask_token_id": 63, "target_layer_ids": [0, 1]}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = write_training(tmp_path / "project")
    edit(folder, "drafter", HEAD | {"draft_vocab_size": 12})
    edit(folder, "second", ...)
    return folder


@pytest.mark.slow
def test_a_head_is_trained_resumed_and_built(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", nth_time(Trainer._update, 4))
        assert train(project).exit_code != 0
    files = trained(project)
    assert logged(project, "first") == LOGGED
    assert json.loads(files["evaluation.json"])["methods"]["chain"]["rows"] == 4
    head = EAGLE3.load(project / "out" / "first", torch.float32)
    assert (head.config.drafts, len(head.config.draft_vocabulary or ())) == (3, 12)
    selector = selector_of_first(project)
    assert {policy.name for policy in selector.policies} >= {"off", "chain", "ddtree"}
    assert trained(project) == files


def test_the_plan_knows_it(project: Path) -> None:
    assert "first drafter   0 of 4 steps" in passed(train(project, "--plan")).output
    edit(project, "drafter.target_layer_ids", [0, 3])
    result = train(project, "--plan")
    assert result.exit_code != 0
    assert "drafter.target_layer_ids" in result.output + repr(result.exception)
