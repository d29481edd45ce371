"""`d2sd train` on a ready first drafter: it is copied and never trained, and the second takes its shape and weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from d2sd.calibration import load_calibration
from d2sd.convert.checkpoint.headers import stored_as
from d2sd.convert.checkpoint.own_files import write_draft_vocabulary
from d2sd.convert.checkpoint.quantization import Quantization
from d2sd.convert.kinds import DFLASH
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.head_configs import PairConfig
from d2sd.policies import DrafterRole
from d2sd.train.loop import Trainer
from d2sd.train.pair_head import PairTrainer
from tests.convert.helpers import edit_json, tree_bytes
from tests.d2sd.cli.train.helpers import draw, edit, rows, train, trained, write_training
from tests.tiny import HEADS, tiny_decoder, tiny_drafter
from tests.train.helpers import noted

GEOMETRY = {"layers": 2, "block_size": 4, "mask_token_id": 62, "target_layer_ids": [0, 2]}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ready drafter that `d2sd train` would not have made: another MLP, mask, depth and aux_layer_ids."""
    monkeypatch.setattr("d2sd.train.pipeline.run.plot_training", draw)
    folder = write_training(tmp_path / "project")
    config = tiny_drafter(tiny_decoder().config, mask_token_id=62, target_layer_ids=(0, 2)).config
    torch.manual_seed(0)
    ready = Drafter(replace(config, body=replace(config.body, intermediate_size=24))).bfloat16()
    (folder / "ready").mkdir()
    DFLASH.write(folder / "ready", ready.config, ready.state_dict())
    edit(folder, "first", ...)
    edit(folder, "ready_first", {"path": "ready"})
    edit(folder, "drafter", GEOMETRY)
    return folder


@pytest.mark.slow
def test_the_second_is_trained_on_the_ready_first(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = noted(monkeypatch, Trainer)
    files = trained(project)
    assert files.keys() == {
        ".d2sd-run.json",
        "calibration.json",
        "curves.png",
        "evaluation.json",
        *(f"{name}/{file}" for name in ("first", "second") for file in ("config.json", "model.safetensors")),
    }
    ((trainer, weights),) = made  # the ready one is not trained
    assert isinstance(trainer.first, Drafter)
    before = DFLASH.load(project / "ready", torch.float32).state_dict()
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before), "it starts from the first"
    ready, first, second = (DFLASH.load(project / path, torch.float32) for path in ("ready", "out/first", "out/second"))
    of_first, of_second = DFLASH.fingerprint(first), DFLASH.fingerprint(second)
    assert DFLASH.fingerprint(trainer.first) == of_first == DFLASH.fingerprint(ready) != of_second
    assert second.config == replace(ready.config, role="variable_prefix", prefix_weight_base=0.9)
    fingerprints = load_calibration(project / "out" / "calibration.json").drafters
    assert fingerprints == {"first": of_first, "second": of_second}
    said = json.loads(files["evaluation.json"])
    assert said["settings"].keys() == {"second"}
    assert said["methods"].keys() == {"chain", "reanchor", "d2sd"}
    assert not (project / "work" / "first.jsonl").exists()
    assert [row["step"] for row in rows(project, "second.jsonl") if "cells" in row] == [3, 4]
    assert trained(project) == files, "a second run ends in the same bytes"


HEAD = {"rank": 4, "candidates": 6, "steps": 3, "batch": 2, "blocks": 4}


@pytest.mark.slow
def test_heads_alone_are_trained_on_a_ready_pair(project: Path) -> None:
    """Training writes the ready drafters with heads, and evaluates and calibrates with these."""
    ready = DFLASH.load(project / "ready", torch.float32)
    config = replace(ready.config, role="variable_prefix", prefix_weight_base=0.9)
    DFLASH.write(project / "ready-second", config, ready.bfloat16().state_dict())
    edit(project, "second", ...)
    edit(project, "ready_second", {"path": "ready-second"})
    edit(project, "head", HEAD)
    files = trained(project)
    sources = {DrafterRole.FIRST: "ready", DrafterRole.SECOND: "ready-second"}
    for role, source in sources.items():
        name = role.key
        made, before = (DFLASH.load(folder, torch.float32) for folder in (project / "out" / name, project / source))
        assert made.config == replace(before.config, head=PairConfig(4, 6))
        for key, tensor in before.state_dict().items():
            assert torch.equal(made.state_dict()[key], tensor)
        assert made.get_parameter("pair_head.successor_projection").any()
        assert load_calibration(project / "out" / "calibration.json").drafters[name] == DFLASH.fingerprint(made)
    said = json.loads(files["evaluation.json"])
    assert said["settings"].keys() == {"head"}
    assert said["methods"].keys() == {"chain", "reanchor", "d2sd"}
    assert trained(project) == files, "a second run ends in the same bytes"

    shutil.copytree(project / "out" / "first", project / "first with a head")
    edit(project, "ready_first", {"path": "first with a head"})
    shutil.rmtree(project / "out")
    again = trained(project)
    weights = "first/model.safetensors"
    assert again[weights] == files[weights], "a pair head that a ready drafter has is replaced"


@pytest.mark.slow
def test_heads_are_trained_after_the_drafters(project: Path) -> None:
    trained(project)
    second = DFLASH.load(project / "out" / "second", torch.float32)
    edit(project, "head", HEAD)
    shutil.rmtree(project / "out")
    trained(project)
    with_head = DFLASH.load(project / "out" / "second", torch.float32)
    assert with_head.config == replace(second.config, head=PairConfig(4, 6))
    for key, tensor in second.state_dict().items():
        assert torch.equal(with_head.state_dict()[key], tensor)
    assert "heads           3 steps each" in train(project, "--plan").stdout


@pytest.mark.slow
def test_heads_learn_from_responses_that_drafters_have_not_seen(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = noted(monkeypatch, Trainer, PairTrainer)
    edit(project, "head", HEAD | {"unseen": 2})
    trained(project)
    assert [type(one) for one, _ in made] == [Trainer, PairTrainer, PairTrainer]
    of_second, of_head, also = ([one.data.name(index) for index in range(len(one.data))] for one, _ in made)
    assert len(of_head) == 2
    assert of_head == also
    assert not {*of_head} & {*of_second}
    shutil.rmtree(project / "out")
    edit(project, "head.unseen", 99)
    assert "head.unseen" in train(project).stderr


def test_another_head_is_refused_before_any_work(project: Path) -> None:
    ready = tiny_drafter(tiny_decoder().config, mask_token_id=62, target_layer_ids=(0, 2), head=HEADS["markov"])
    DFLASH.write(project / "ready", ready.config, ready.state_dict())
    edit(project, "head", HEAD)
    refused(project, ["has a head already", "dspark"])


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param("selector", marks=pytest.mark.slow),
        pytest.param("markov", marks=pytest.mark.full),
    ],
)
def test_the_second_is_plain_behind_a_first_that_is_not(
    project: Path, monkeypatch: pytest.MonkeyPatch, head: str | None
) -> None:
    """A windowed, causal and shifted first drafter with sinks, a mask embedding and a head: the second has none of
    that.
    """
    before = DFLASH.read_config(project / "ready")
    scored = None if head is None else HEADS[head]
    body = replace(before.body, windows=(6, None), causal=(True, False), sinks=True)
    ready = Drafter(replace(before, body=body, sample_from_anchor=True, mask_embedding=True, head=scored)).bfloat16()
    with torch.no_grad():
        for parameter in ready.parameters():
            parameter.normal_(std=0.2)
    DFLASH.write(project / "ready", ready.config, ready.state_dict())
    made = noted(monkeypatch, Trainer)
    trained(project)
    ((_, weights),) = made
    told = ready.float().state_dict()
    assert all(torch.equal(weights[name], told[name]) for name in weights), "it starts from the first"
    first, second = (DFLASH.read_config(project / "out" / name) for name in ("first", "second"))
    assert first == ready.config
    assert second == replace(before, role="variable_prefix", prefix_weight_base=0.9)


@pytest.mark.slow
def test_both_draft_among_the_ready_ones_vocabulary(project: Path) -> None:
    expected = tuple(range(0, 60, 2))
    write_draft_vocabulary(project / "ready", expected, 64)
    trained(project)
    assert DFLASH.read_config(project / "out" / "first").draft_vocabulary == expected
    assert DFLASH.read_config(project / "out" / "second").draft_vocabulary == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("layers", 1, ["num_hidden_layers", "found: 2", "expected: 1"]),
        ("block_size", 8, ["block_size", "found: 4", "expected: 8"]),
        ("mask_token_id", 63, ["mask_token_id", "found: 62", "expected: 63"]),
        ("target_layer_ids", [0, 1], ["target_layer_ids", "found: [0, 2]", "expected: [0, 1]"]),
    ],
)
@pytest.mark.parametrize("more", [(), ("--plan",)], ids=["run", "plan"])
def test_another_shape_than_the_recipes_is_refused_before_any_work(
    project: Path, key: str, value: object, told: list[str], more: tuple[str, ...]
) -> None:
    edit(project, f"drafter.{key}", value)
    refused(project, told, more)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("rope_theta", 5.0, ["another target", "rope_theta"]),
        ("dflash_config.training_mode", "vp_drafter", ["training_mode", "first"]),
        ("intermediate_size", 28, ["mlp", "[32, 24]", "[32, 28]"]),
    ],
    ids=["of another target", "a second drafter", "other weights than its config's"],
)
def test_a_drafter_that_is_no_first_one_here_is_refused_before_any_work(
    project: Path, key: str, value: object, told: list[str]
) -> None:
    edit_json(project / "ready" / "config.json", key, value)
    refused(project, told)


def refused(project: Path, told: list[str], more: tuple[str, ...] = ()) -> None:
    result = train(project, *more)
    assert result.exit_code == 2
    for part in told:
        assert part in result.stderr
    assert not (project / "out").exists()
    assert not (project / "work" / "answers.jsonl").exists()


def test_a_quantized_drafter_is_refused_before_any_work(project: Path) -> None:
    config = DFLASH.read_config(project / "ready")
    narrow = Quantization(("fc", "*.q_proj", "*.k_proj", "*.v_proj"), False, ("test", "1"))
    shapes = DFLASH.shapes(config, narrow)
    kinds = {"unquantized": torch.bfloat16, "FP8": torch.float8_e4m3fn, "scale": torch.float32}
    tensors = {name: torch.ones(shape).to(kinds[stored_as(name, shapes)]) for name, shape in shapes.items()}
    DFLASH.write(project / "ready", config, tensors, narrow)
    refused(project, ["quantized", "ready"])


def test_a_plan_names_it(project: Path) -> None:
    before = tree_bytes(project)
    shown = train(project, "--plan")
    assert shown.exit_code == 0, shown.output
    assert f"first drafter   ready: {project / 'ready'}\n" in shown.stdout
    assert tree_bytes(project) == before
