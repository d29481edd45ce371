"""`d2sd train` leaves the pair, its log, its answers, its figures and its calibration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from d2sd.bench.result import load_result
from d2sd.bundle.load import load_bundle
from d2sd.calibration import load_calibration
from d2sd.convert.kinds import DFLASH
from d2sd.io import MARKER
from d2sd.policies import DrafterRole
from d2sd.progress import silent
from d2sd.runtime.evaluation import Evaluation
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import Evaluator
from d2sd.train_recipe import load_train_recipe
from tests.commands import passed, succeeds
from tests.convert.helpers import tree_bytes
from tests.d2sd.cli.train.helpers import (
    LOGGED,
    PROMPTS,
    STOP,
    bundled,
    edit,
    logged,
    nth_time,
    read,
    rows,
    train,
    trained,
    undo,
)
from tests.tiny import greedy_text, tiny_decoder


def test_the_pair(whole: Path) -> None:
    assert sorted(tree_bytes(whole / "out")) == [
        MARKER,
        "calibration.json",
        "curves.png",
        "evaluation.json",
        *(f"{name}/{file}" for name in ("first", "second") for file in ("config.json", "model.safetensors")),
    ]
    drafters = []
    for role in (DrafterRole.FIRST, DrafterRole.SECOND):
        folder = whole / "out" / role.key
        config = DFLASH.read_config(folder)
        DFLASH.check(config, tiny_decoder().config, role, 4, folder)
        DFLASH.check_tensors(folder, config)
        drafters.append(torch.cat([p.flatten() for p in DFLASH.load(folder, torch.bfloat16).parameters()]))
    assert drafters[0].isfinite().all()
    assert not torch.equal(*drafters), "the second one has been trained further"


def test_the_lines_of_a_recipe_are_printed(whole: Path) -> None:
    _, _, told = (
        whole.with_name("stderr").read_text().partition("serve them: d2sd-build RECIPE, with these lines in it\n")
    )
    (drafters,) = yaml.safe_load(told).values()
    assert {place: Path(source["path"]) for place, source in drafters.items()} == {
        place: whole / "out" / file
        for place, file in (("first", "first"), ("second", "second"), ("calibration", "calibration.json"))
    }


def test_the_log_has_every_step_once(whole: Path) -> None:
    for name, methods in (("first", {"chain"}), ("second", {"reanchor", "d2sd"})):
        found = rows(whole, f"{name}.jsonl")
        assert logged(whole, name) == LOGGED
        for row in found:
            assert row["seconds"] > 0
            if "cells" in row:
                assert row["tau"].keys() == {cell["method"] for cell in row["cells"]} == methods
            else:
                assert row["loss"] == pytest.approx(0.3 * row["ce"] + 0.7 * row["kl"], rel=1e-4)
                assert 0 < row["loss"] < 50
                assert row["gradient norm"] > 0
                assert 0 < row["learning rate"] <= 5e-3


def test_responses_are_the_targets_with_one_line_per_prompt(whole: Path) -> None:
    stdout = whole.with_name("stdout").read_text()
    found = {line["id"]: line for line in rows(whole, "answers.jsonl")}
    turns = {line["id"]: line for line in rows(whole, "turns.jsonl")}
    assert turns.keys() == {f"self/kind/{i}" for i in range(8)}
    ended = {name: line["text"] for name, line in turns.items() if "text" in line}
    assert 0 < len(ended) < 8, "turns that did not end are dropped"
    assert f"prompts left out: {8 - len(ended)} (turn not finished within max_tokens)" in stdout
    for text in ended.values():
        assert text.startswith(("w7 ", "w8 w9 "))
        assert f"w{STOP}" not in text.split(), "what ended the turn is not part of its text"
    assert found.keys() - turns.keys() == {*(f"p{i}" for i in range(PROMPTS)), *{"again", "once more"} & found.keys()}
    assert len({"again", "once more"} & found.keys()) == 1
    assert "prompts left out: 1 (nearly the same as another)" in stdout
    assert "prompts left out: 1 (shares words with an excluded prompt)" in stdout
    assert "prompts left out: 1 (longer than data.max_prompt_tokens)" in stdout
    decoder = tiny_decoder()
    for i in range(PROMPTS):
        line = found[f"p{i}"]
        prompt = [60, i, i + 20, i + 40, 61, 62]
        said = greedy_text(decoder, prompt, 8)
        assert line.get("prompt_ids", prompt) == prompt
        stops = [place for place, token in enumerate(said, 1) if token == STOP]
        assert line.get("answer_ids", said[:1]) == said[: stops[0] if stops else 8]


@pytest.mark.slow
def test_evaluations_are_the_benchs(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle of the written pair, benched on the same prompts, one after the other: the same figures."""
    monkeypatch.setattr("d2sd.bench.run.write_plots", lambda result, folder: [])
    texts = {json.loads(line)["id"]: line for line in (finished / "prompts.jsonl").read_text().splitlines()}
    said = json.loads((finished / "out" / "evaluation.json").read_text())
    assert len(said["prompts"]) == 2
    assert said["settings"]["second"]["steps"] == 4
    (finished / "held.jsonl").write_text("\n".join(texts[name] for name in said["prompts"]) + "\n")
    methods = ("--methods", "chain,reanchor,d2sd", "--temperatures", "0", "--rows", 64, "--max-new-tokens", 8)
    places = ("--prompts", finished / "held.jsonl", "--out", finished / "bench")
    succeeds("bench", bundled(finished, calibrated=False), *methods, *places)
    cells = {cell.method: cell for cell in load_result(finished / "bench" / "result.json").cells}
    last = {name: rows(finished, f"{name}.jsonl")[-1] for name in ("first", "second")}
    for method, of in (("chain", "first"), ("reanchor", "second"), ("d2sd", "second")):
        benched = Evaluation.model_validate(cells[method].model_dump())
        assert {**said["methods"][method], "rows": 64} == {**benched.figures(), "rows": 64}
        (logged,) = (Evaluation.model_validate(cell) for cell in last[of]["cells"] if cell["method"] == method)
        assert [one.accepted for one in logged.requests] == [one.accepted for one in cells[method].requests]
        for drafter, bins in cells[method].calibration.items():  # the weights that are written, not those that train
            assert torch.tensor(logged.calibration[drafter]).allclose(torch.tensor(bins), atol=1e-5)
    assert said["methods"]["d2sd"]["calibration error"].keys() == {"first", "second"}
    assert said["methods"]["d2sd"]["tau"] > 1
    assert said["methods"]["d2sd"]["joint acceptance"]


def test_an_evaluation_leaves_the_target_as_it_is(finished: Path) -> None:
    """Packed layers round otherwise: online features would change on the way."""
    bundle = load_bundle(finished / "work" / "target")
    before = list(bundle.target.state_dict())
    recipe = load_train_recipe(finished / "train.yaml")
    evaluator = Evaluator(recipe, bundle, read(finished)[:3], "cpu", silent)
    cell = evaluator.evaluate("chain", {DrafterRole.FIRST: DFLASH.load(finished / "out" / "first", torch.float32)})
    assert len(cell.requests) == 2
    assert list(bundle.target.state_dict()) == before


def test_the_calibration_is_of_the_pair_and_the_build_takes_it(finished: Path) -> None:
    found = load_calibration(finished / "out" / "calibration.json")
    drafters = {name: DFLASH.load(finished / "out" / name, torch.float32) for name in ("first", "second")}
    assert found.drafters == {name: DFLASH.fingerprint(drafter) for name, drafter in drafters.items()}
    assert (found.report["prompts"], found.report["max_new_tokens"]) == (3, 8)
    assert load_bundle(bundled(finished)).calibration == found


@pytest.mark.slow
def test_without_a_second_drafter(finished: Path) -> None:
    edit(finished, "second", ...)
    shutil.rmtree(finished / "out")
    assert {name.split("/")[0] for name in trained(finished)} == {
        MARKER,
        "first",
        "calibration.json",
        "curves.png",
        "evaluation.json",
    }
    assert json.loads((finished / "out" / "evaluation.json").read_text())["methods"].keys() == {"chain", "reanchor"}
    assert load_calibration(finished / "out" / "calibration.json").drafters.keys() == {"first"}


@pytest.mark.slow
def test_online_features_are_stored_nowhere(finished: Path) -> None:
    edit(finished, "data.features", "online")
    edit(finished, "second", ...)
    undo(finished, "features")
    undo(finished, "first")
    trained(finished)
    assert not list((finished / "work").glob("features*"))


@pytest.mark.slow
def test_draft_vocabulary_has_the_most_frequent_response_ids(finished: Path) -> None:
    edit(finished, "drafter.draft_vocab_size", 12)
    shutil.rmtree(finished / "out")
    files = trained(finished)
    assert files["first/draft_vocab.json"] == files["second/draft_vocab.json"]
    ids = DFLASH.read_config(finished / "out" / "second").draft_vocabulary
    assert ids is not None
    assert len(ids) == 12
    assert 63 not in ids, "the mask"
    assert set(ids) < {token for answer in read(finished) for token in answer.response_ids}
    bundled(finished)


@pytest.mark.slow
def test_bars_end_where_they_said(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a first run, in one that resumes, and in one with nothing to do."""
    told: list[tuple[str, int | None, int]] = []

    @contextmanager
    def bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        counts: list[int] = []
        yield counts.append
        told.append((what, total, sum(counts)))

    monkeypatch.setattr("d2sd.cli.train.bar", bar)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", nth_time(Trainer._update, 4))
        assert train(project).exit_code == 130
    assert [(what, total) for what, total, _ in told if what in ("turns", "answers", "features")] == [
        ("turns", 8),
        ("answers", len(rows(project, "answers.jsonl"))),
        ("features", len(read(project))),
    ]
    trained(project)
    trained(project)
    assert {what for what, _, _ in told} >= {
        "prompts",
        "answers",
        "features",
        "training first",
        "training second",
        "evaluating chain",
        "evaluating d2sd",
    }
    assert [(what, total, done) for what, total, done in told if total is not None and done != total] == []


def test_the_plan_writes_nothing_and_tells_what_is_done(project: Path, finished: Path) -> None:
    before = tree_bytes(project)
    told = {line[:16].strip(): line[16:] for line in planned(project)}
    assert tree_bytes(project) == before
    assert told["target"].endswith("to be built")
    assert told["turns"] == "0 of 8 written by the target; time unknown"
    assert told["answers"] == f"0 of at most {8 + PROMPTS + 4} prompts answered; time unknown"
    assert told["features"].startswith("0 sequences stored, 0.1 MB at most")  # 21 x 24 tokens x 3 x 32 x 2 bytes
    assert told["first drafter"] == told["second drafter"] == "0 of 4 steps; time unknown"
    done = {line[:16].strip(): line[16:] for line in planned(finished)}
    assert done["target"].endswith("ready")
    assert done["turns"] == "8 of 8 written by the target"
    count = len(rows(finished, "answers.jsonl"))
    assert done["answers"] == f"{count} of {count} prompts answered"
    assert done["features"].startswith(f"{len(read(finished))} sequences stored, 0.0 MB for the responses so far")
    assert done["first drafter"] == done["second drafter"] == "4 of 4 steps"


def test_the_plan_estimates_from_what_was_measured(finished: Path) -> None:
    edit(finished, "second.steps", 1003)
    paces = [{"stage": "answers", "count": 10, "seconds": 40.0}, {"stage": "answers", "count": 10, "seconds": 20.0}]
    (finished / "work" / "pace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in paces))
    log = finished / "work" / "second.jsonl"
    log.write_text(
        "".join(json.dumps(row | {"seconds": 30 if "cells" in row else 2}) + "\n" for row in rows(finished, log.name))
    )
    answers = (finished / "work" / "answers.jsonl").read_text().splitlines()
    (finished / "work" / "answers.jsonl").write_text("\n".join(answers[:-2]) + "\n")
    told = {line[:16].strip(): line[16:] for line in planned(finished)}
    assert told["answers"].endswith("prompts answered; about 6 s left at the pace so far")
    # 999 steps of 2 s and evaluations of 30 s at 6, 9, ..., 1002: 11,988 s
    assert told["second drafter"] == "4 of 1,003 steps; about 3 h left at the pace so far"


def planned(project: Path) -> list[str]:
    return passed(train(project, "--plan")).stdout.splitlines()
