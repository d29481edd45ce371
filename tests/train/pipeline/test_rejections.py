"""Second drafters are trained on rejections of an earlier state and on corrections; both may start trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from d2sd.convert.kinds import DFLASH
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.train.data.draws import PrefixDraws, choose_prefixes
from d2sd.train.loop import Trainer
from d2sd.train.rejections import kept_steps
from tests.commands import refused
from tests.d2sd.cli.train.helpers import SETTINGS, draw, edit, refusal, train, trained, undo, write_training
from tests.tiny import tiny_decoder, tiny_drafter
from tests.train.helpers import noted, settings


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("d2sd.train.pipeline.run.plot_training", draw)
    return write_training(tmp_path / "project")


@pytest.mark.slow
def test_an_earlier_state_of_the_first_rejects(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With features in memory. The second starts from the last state, and a second run ends in the same bytes."""
    edit(project, "second", SETTINGS | {"rejections": "matched"})
    edit(project, "data.features", "device")
    made = noted(monkeypatch, Trainer)
    monkeypatch.setattr("d2sd.train.rejections.mean_right", lambda one, *given: float(one is not made[0][0].drafter))
    files = trained(project)
    assert not (project / "work" / "features.bf16").exists()
    kept = {path.name for path in (project / "work" / "first").glob("step-*")}
    assert kept == {f"step-{step}.safetensors" for step in kept_steps(SETTINGS["steps"])}
    (one, _), (two, began) = made
    assert isinstance(two.first, Drafter)
    assert two.first is one.drafter, "its rate on held-out responses is met by itself alone"
    assert all(torch.equal(began[name], tensor) for name, tensor in one.drafter.state_dict().items())

    undo(project, "second")
    monkeypatch.undo()
    monkeypatch.setattr("d2sd.train.pipeline.run.plot_training", draw)
    again = noted(monkeypatch, Trainer)
    trained(project)
    assert trained(project).keys() == files.keys()
    assert isinstance(again[1][0].first, Drafter)


@pytest.mark.slow
def test_no_kept_state_is_a_message(project: Path) -> None:
    trained(project)
    undo(project, "second")
    edit(project, "second", SETTINGS | {"rejections": "matched"})
    refused(train(project), "no earlier state")


def test_matched_needs_a_trained_first(project: Path) -> None:
    edit(project, "first", ...)
    edit(project, "ready_first", {"path": "ready"})
    edit(project, "second", SETTINGS | {"rejections": "matched"})
    assert "matched needs a first drafter that is trained" in refusal(project)


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [9, 12], ids=["as many ids", "more"])
def test_both_drafters_may_start_trained(drafted: int, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another block size than they have; ids of a draft vocabulary of the same size stay."""
    drafter = tiny_drafter(tiny_decoder().config, mask_token_id=63, target_layer_ids=(0, 1))
    stored = []
    for name, config in (("first", drafter.config), ("second", replace(drafter.config, role="variable_prefix"))):
        start = Drafter(replace(config, draft_vocabulary=tuple(range(9)))).bfloat16()
        (project / name).mkdir()
        DFLASH.write(project / name, start.config, start.state_dict())
        edit(project, name, SETTINGS | {"start": {"path": name}})
        stored.append(DFLASH.load(project / name, torch.float32).state_dict())
    edit(project, "drafter.layers", drafter.config.body.num_layers)
    edit(project, "drafter.block_size", drafter.config.block_size + 2)
    edit(project, "drafter.draft_vocab_size", drafted)
    made = noted(monkeypatch, Trainer)
    trained(project)
    for (_, began), tensors in zip(made, stored, strict=True):
        assert all(torch.equal(began[name], tensors[name]) for name in tensors)
    for role in ("first", "second"):
        config = DFLASH.read_config(project / "out" / role)
        assert config.block_size == drafter.config.block_size + 2
        assert config.draft_vocabulary is not None
        assert len(config.draft_vocabulary) == drafted
        assert (config.draft_vocabulary == tuple(range(9))) == (drafted == 9)
        assert config.role == ("first" if role == "first" else "variable_prefix")


def test_a_second_that_starts_trained_has_layers_of_its_own(project: Path) -> None:
    edit(project, "second", SETTINGS | {"start": {"path": "nowhere"}, "layers": 1})
    assert "second.start has its own" in refusal(project)
    edit(project, "second", SETTINGS | {"start": {"path": "nowhere"}})
    assert "nowhere" in refusal(project)


def test_kinds_of_prefixes() -> None:
    """A rejection, a correction, what neither takes, no error, and an error in the last slot."""
    errors = torch.tensor([[2, 2, 2, 4, 3, 3]])
    drafted = torch.tensor([[9, 9, 9, 9, 9, 9]])
    draws = PrefixDraws(torch.ones(1, 6, dtype=torch.long), torch.tensor([[0.1, 0.6, 0.9, 0.1, 0.6, 0.1]]))
    chosen = settings(on_rejection=0.5, on_correction=0.25, blocks=6)
    visible, rejected = choose_prefixes(errors, drafted, 4, chosen, draws)
    assert visible.tolist() == [[2, 3, 1, 1, 1, 3]]
    assert rejected.tolist() == [[9, -1, -1, -1, -1, 9]]
    with pytest.raises(ValueError, match="above 1"):
        settings(on_rejection=0.8, on_correction=0.3)
