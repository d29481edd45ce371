"""`d2sd train` on a tiny target: what it leaves, that it resumes to the same bytes, and what it refuses before hours of
work.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from d2sd.bench.result import load_result
from d2sd.calibration import load_calibration
from d2sd.cli.main import main
from d2sd.convert.bundle.load import load_bundle
from d2sd.convert.checkpoint.drafter import (
    check_compatible,
    check_drafter_tensors,
    fingerprint,
    load_drafter,
    read_drafter_config,
)
from d2sd.modeling.config import Role
from d2sd.progress import silent
from d2sd.train.data.responses import Response, read_responses
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import Evaluator
from d2sd.train.pipeline.evaluation import Evaluation
from d2sd.train_recipe import load_train_recipe
from d2sd.viz.training import Curve
from tests.convert.helpers import edit_json, set_key, tree_bytes, write_target_dir
from tests.tiny import greedy_text, tiny_decoder

PROMPTS = 9
STOP = 37
TEMPLATE = "{% for m in messages %}w60 {{ m['content'] }} w61 {% endfor %}{% if add_generation_prompt %}w62 {% endif %}"
SETTINGS: dict[str, Any] = {
    "steps": 4, "objective": {"ce": 0.3, "kl": 0.7}, "batch": 2, "blocks": 4, "learning_rate": 5e-3,
    "save_every": 2, "evaluate_every": 3, "frequent": 32, "negatives": 8,
}  # fmt: skip


def write_training(folder: Path) -> Path:
    """A target with a chat template that stops now and then, prompts, and a training recipe."""
    write_target_dir(folder / "target", tiny_decoder())
    settings = folder / "target" / "tokenizer_config.json"
    edit_json(settings, "chat_template", TEMPLATE)
    for token in ("eos_token", "unk_token"):  # a special token is found inside longer words, as w2 is in w20
        edit_json(settings, token, f"w{STOP}")
    (folder / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP}))
    lines = [{"id": f"p{i}", "turns": [f"w{i} w{i + 20} w{i + 40}", "ignored"]} for i in range(PROMPTS)]
    lines.append({"id": "long", "turns": [" ".join(f"w{i}" for i in range(20, 0, -1))]})
    lines.append({"id": "again", "turns": ["w51 w52 w53"]})
    lines.append({"id": "once more", "turns": ["W51, W52 w53!"]})
    lines.append({"id": "asked", "turns": ["w10 w11 w12"]})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = {"id": "k", "turns": ["w54 w55 w56", "w9 w10 w11 w12 w13"]}  # second turns are asked too
    (folder / "asked.jsonl").write_text(json.dumps(asked) + "\n")
    recipe = {
        "d2sd_train": 1,
        "name": "tiny",
        "target": {"path": "target"},
        "precision": "fp32",
        "max_batch": 4,
        "drafter": {"layers": 1, "block_size": 4, "mask_token_id": 63, "target_layer_ids": [0, 1]},
        "data": {
            "prompts": [{"path": "prompts.jsonl"}],
            "exclude": ["asked.jsonl"],
            "self_written": [{"name": "kind", "count": 8, "openings": ["w7 ", "w8 w9 "], "max_tokens": 9}],
            "max_prompt_tokens": 16,
            "max_new_tokens": 8,
            "held_out": 3,
        },
        "first": SETTINGS,
        "second": SETTINGS,
        "evaluation": {"prompts": 2, "max_new_tokens": 8},
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Instead of a picture, which takes a second, what is to be seen in it: all but times."""
    cells = [curve.evaluations for curve in curves]
    path.write_text(repr([(curve.drafter, curve.steps) for curve in curves]) + repr(cells))


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2sd.train.pipeline.run.plot_training", draw)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_training(tmp_path / "project")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A project whose training has ended, uninterrupted, and what was told. Copy before changing it."""
    folder = write_training(tmp_path_factory.mktemp("whole") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d2sd.train.pipeline.run.plot_training", draw)
        result = train(folder)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return folder, result


@pytest.fixture
def finished(whole: tuple[Path, Result], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[0], tmp_path / "finished"))


@pytest.fixture
def expected(whole: tuple[Path, Result]) -> dict[str, bytes]:
    """The bytes of an uninterrupted run."""
    return tree_bytes(whole[0] / "out")


def edit(project: Path, key: str, value: object) -> None:
    """Set a dotted key of the recipe; ... deletes it."""
    path = project / "train.yaml"
    values = yaml.safe_load(path.read_text())
    set_key(values, key, value)
    path.write_text(yaml.safe_dump(values))


def arguments(project: Path) -> list[str]:
    return ["train", f"{project}/train.yaml", "--work", f"{project}/work", "--out", f"{project}/out"]


def train(project: Path, *more: str) -> Result:
    return CliRunner().invoke(main, [*arguments(project), *more])


def trained(project: Path) -> dict[str, bytes]:
    result = train(project)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return tree_bytes(project / "out")


def rows(project: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project / "work" / name).read_text().splitlines()]


# --- What it leaves --------------------------------------------------------------------------------------------------


def test_the_pair(whole: tuple[Path, Result]) -> None:
    project, _ = whole
    assert sorted(tree_bytes(project / "out")) == [
        "calibration.json", "curves.png", "evaluation.json",
        *(f"{name}/{file}" for name in ("first", "second") for file in ("config.json", "model.safetensors")),
    ]  # fmt: skip
    roles: dict[str, Role] = {"first": "first", "second": "variable_prefix"}
    drafters = []
    for name, role in roles.items():
        folder = project / "out" / name
        config = read_drafter_config(folder)
        check_compatible(config, tiny_decoder().config, role=role, block_size=4, where=folder)
        check_drafter_tensors(folder, config)
        drafters.append(torch.cat([p.flatten() for p in load_drafter(folder, torch.bfloat16).parameters()]))
    assert drafters[0].isfinite().all()
    assert not torch.equal(*drafters), "the second one has been trained further"


def test_the_log_has_every_step_once(whole: tuple[Path, Result]) -> None:
    for name, methods in (("first", {"chain"}), ("second", {"reanchor", "d2sd"})):
        found = rows(whole[0], f"{name}.jsonl")
        assert [(row["step"], "cells" in row) for row in found] == [
            (1, False), (2, False), (3, False), (3, True), (4, False), (4, True),
        ]  # fmt: skip
        for row in found:
            assert row["seconds"] > 0
            if "cells" in row:
                assert row["tau"].keys() == {cell["method"] for cell in row["cells"]} == methods
            else:
                assert row["loss"] == pytest.approx(0.3 * row["ce"] + 0.7 * row["kl"], rel=1e-4)
                assert 0 < row["loss"] < 50
                assert row["gradient norm"] > 0
                assert 0 < row["learning rate"] <= 5e-3


def test_answers_are_the_targets_and_every_prompt_leaves_one_line(whole: tuple[Path, Result]) -> None:
    project, result = whole
    found = {line["id"]: line for line in rows(project, "answers.jsonl")}
    turns = {line["id"]: line for line in rows(project, "turns.jsonl")}
    assert turns.keys() == {f"self/kind/{i}" for i in range(8)}
    ended = {name: line["text"] for name, line in turns.items() if "text" in line}
    assert 0 < len(ended) < 8, "turns that did not end are dropped"
    assert f"prompts left out: {8 - len(ended)} (a turn without an end)" in result.stdout
    for text in ended.values():
        assert text.startswith(("w7 ", "w8 w9 "))
        assert f"w{STOP}" not in text.split(), "what ended the turn is not part of its text"
    assert found.keys() - turns.keys() == {*(f"p{i}" for i in range(PROMPTS)), *{"again", "once more"} & found.keys()}
    assert len({"again", "once more"} & found.keys()) == 1
    assert "prompts left out: 1 (nearly the same as another)" in result.stdout
    assert "prompts left out: 1 (shares words with an excluded prompt)" in result.stdout
    assert "prompts left out: 1 (longer than data.max_prompt_tokens)" in result.stdout
    decoder = tiny_decoder()
    for i in range(PROMPTS):
        line = found[f"p{i}"]
        prompt = [60, i, i + 20, i + 40, 61, 62]
        said = greedy_text(decoder, prompt, 8)
        assert line.get("prompt_ids", prompt) == prompt
        stops = [place for place, token in enumerate(said, 1) if token == STOP]
        assert line.get("answer_ids", said[:1]) == said[: stops[0] if stops else 8]


def bundled(finished: Path, calibration: str | None) -> Path:
    recipe = {
        "d2sd": 1, "name": "tiny", "target": {"path": "target"}, "limits": {"max_context": 64},
        "drafters": {"first": {"path": "out/first"}, "second": {"path": "out/second"}, "calibration": calibration},
        "tree": {"block_size": 4, "branches": 3}, "sampling": {"max_new_tokens": 8},
    }  # fmt: skip
    (finished / "bundle.yaml").write_text(yaml.safe_dump(recipe))
    ended = CliRunner().invoke(main, ["build", f"{finished}/bundle.yaml", "--out", f"{finished}/bundle"])
    assert ended.exit_code == 0, ended.output + repr(ended.exception)
    return finished / "bundle"


def test_evaluations_are_the_benchs(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle of the written pair, benched on the same prompts, one after the other: the same figures."""
    monkeypatch.setattr("d2sd.bench.run.write_plots", lambda result, folder: [])
    texts = {json.loads(line)["id"]: line for line in (finished / "prompts.jsonl").read_text().splitlines()}
    said = json.loads((finished / "out" / "evaluation.json").read_text())
    assert len(said["prompts"]) == 2
    assert said["settings"]["second"]["steps"] == 4
    (finished / "held.jsonl").write_text("\n".join(texts[name] for name in said["prompts"]) + "\n")
    ended = CliRunner().invoke(main, [
        "bench", str(bundled(finished, None)), "--prompts", f"{finished}/held.jsonl", "--temperatures", "0",
        "--methods", "chain,reanchor,d2sd", "--rows", "64", "--max-new-tokens", "8", "--out", f"{finished}/bench",
    ])  # fmt: skip
    assert ended.exit_code == 0, ended.output + repr(ended.exception)
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
    """Engines repack what they run, and packed layers round otherwise: online features would change on the way."""
    bundle = load_bundle(finished / "work" / "target")
    before = list(bundle.target.state_dict())
    recipe = load_train_recipe(finished / "train.yaml")
    evaluator = Evaluator(recipe, bundle, read(finished)[:3], "cpu", silent)
    cell = evaluator.evaluate("chain", load_drafter(finished / "out" / "first", torch.float32))
    assert len(cell.requests) == 2
    assert list(bundle.target.state_dict()) == before


def test_the_calibration_is_of_the_pair_and_the_build_takes_it(finished: Path) -> None:
    found = load_calibration(finished / "out" / "calibration.json")
    marks = [fingerprint(load_drafter(finished / "out" / name, torch.float32)) for name in ("first", "second")]
    assert list(found.drafters) == marks
    assert (found.report["prompts"], found.report["max_new_tokens"]) == (3, 8)
    assert load_bundle(bundled(finished, "out/calibration.json")).calibration == found


def test_a_second_run_asks_trains_and_measures_nothing_and_writes_the_same_bytes(
    finished: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = (finished / "work" / "answers.jsonl").read_bytes()

    def refuse(*args: object, **kwargs: object) -> Any:
        raise AssertionError("it was done before")

    monkeypatch.setattr(Trainer, "_update", refuse)
    monkeypatch.setattr("d2sd.runtime.engine.Engine.submit", refuse)
    monkeypatch.setattr("d2sd.train.pipeline.target.build", refuse)
    assert trained(finished) == expected
    assert (finished / "work" / "answers.jsonl").read_bytes() == answers


def test_without_a_second_drafter(finished: Path) -> None:
    edit(finished, "second", ...)
    shutil.rmtree(finished / "out")
    assert {name.split("/")[0] for name in trained(finished)} == {
        "first", "calibration.json", "curves.png", "evaluation.json",
    }  # fmt: skip
    assert json.loads((finished / "out" / "evaluation.json").read_text())["methods"].keys() == {"chain", "reanchor"}
    assert load_calibration(finished / "out" / "calibration.json").drafters[1] is None


def test_online_features_are_stored_nowhere(finished: Path) -> None:
    edit(finished, "data.features", "online")
    edit(finished, "second", ...)
    undo(finished, "features")
    undo(finished, "first")
    trained(finished)
    assert not list((finished / "work").glob("features*"))


def test_drafts_are_chosen_among_the_answers_most_frequent_ids(finished: Path) -> None:
    edit(finished, "drafter.draft_vocab_size", 12)
    files = trained(finished)
    assert files["first/draft_vocab.json"] == files["second/draft_vocab.json"]
    ids = read_drafter_config(finished / "out" / "second").draft_vocabulary
    assert ids is not None
    assert len(ids) == 12
    assert 63 not in ids, "the mask"
    assert set(ids) < {token for answer in read(finished) for token in answer.response_ids}
    bundled(finished, "out/calibration.json")


# --- Interruptions ---------------------------------------------------------------------------------------------------


def nth_time(real: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The real function, interrupted as by Ctrl-C at its nth call."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("undone", "name", "number"),
    [
        pytest.param(["turns", "answers"], "d2sd.train.data.jsonl.append_row", 3, id="writing a turn"),
        pytest.param(["answers"], "d2sd.runtime.engine.Engine.step", 5, id="answering"),
        pytest.param(["answers"], "d2sd.train.pipeline.responses.append_response", 7, id="writing an answer"),
        pytest.param(["features"], "d2sd.train.pipeline.run.Evaluator", 1, id="behind the features"),
        pytest.param(["first"], "d2sd.train.loop.Trainer._update", 4, id="training the first"),
        pytest.param(["first"], "d2sd.train.pipeline.evaluate.run_observed", 1, id="evaluating the first"),
        pytest.param(["first"], "d2sd.train.pipeline.evaluate.run_observed", 2, id="evaluating the first in the end"),
        pytest.param(["second"], "d2sd.train.pipeline.evaluate.run_observed", 3, id="evaluating the second in the end"),
        pytest.param(["second"], "d2sd.train.state.save_file", 1, id="saving the second"),
        pytest.param(["second"], "d2sd.convert.checkpoint.drafter.write_tensors", 2, id="writing the second"),
        pytest.param(["evaluation"], "d2sd.train.pipeline.evaluate.run_observed", 2, id="evaluating the pair"),
        pytest.param(["calibration"], "d2sd.train.confidence.fit.observe", 9, id="calibrating"),
    ],
)
def test_interrupted_anywhere_it_ends_in_the_same_bytes(
    finished: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch,
    undone: list[str], name: str, number: int,
) -> None:  # fmt: skip
    """Also while answering, when answers come in another order: what follows was made of those of `whole`."""
    for what in undone:
        undo(finished, what)
    holder, attribute = name.rsplit(".", 1)
    owner = resolve_name(holder)
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, nth_time(getattr(owner, attribute), number))
        result = train(finished)
        assert result.exit_code == 130, result.output + repr(result.exception)
        assert "interrupted" in result.stderr
    assert trained(finished) == expected


def undo(project: Path, what: str) -> None:
    """As if it had never been done."""
    shutil.rmtree(project / "out", ignore_errors=True)
    shutil.rmtree(project / "work" / what, ignore_errors=True)
    for path in (project / "work").glob(f"{what}.*"):
        path.unlink()


def test_killed_by_the_kernel_in_the_middle_of_training_it_resumes(finished: Path, expected: dict[str, bytes]) -> None:
    undo(finished, "first")
    killed = subprocess.run(
        [sys.executable, script(finished, """
calls = []
def update(self):
    calls.append(None)
    if len(calls) == 4:  # the last step
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self)
real, Trainer._update = Trainer._update, update
""")],
        check=False, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (finished / "work" / "first" / "state.safetensors").is_file()
    with (finished / "work" / "first.jsonl").open("a") as log:
        log.write('{"step": 4, "lo')  # a line that a kill has cut
    assert trained(finished) == expected
    assert [(row["step"], "cells" in row) for row in rows(finished, "first.jsonl")] == [
        (1, False), (2, False), (3, False), (3, True), (4, False), (4, True),
    ]  # fmt: skip


def script(project: Path, before: str = "") -> Path:
    """A program that runs the command without pictures."""
    path = project / "program.py"
    path.write_text(f"""
import os, signal, torch, d2sd.train.pipeline.run
from d2sd.cli.main import main
from d2sd.train.loop import Trainer
d2sd.train.pipeline.run.plot_training = lambda curves, path: None
torch.set_num_threads(1)
{before}
main({arguments(project)})
""")
    return path


def test_a_cut_answer_is_asked_again(finished: Path, expected: dict[str, bytes]) -> None:
    path = finished / "work" / "answers.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    undo(finished, "first")
    assert trained(finished) == expected
    assert path.read_bytes() == whole


def test_the_order_of_the_answers_is_the_recipes_not_the_files(finished: Path, expected: dict[str, bytes]) -> None:
    """Short answers finish early, and the first ones are held out; an interruption changes what finishes when."""
    path = finished / "work" / "answers.jsonl"
    path.write_text("".join(line + "\n" for line in reversed(path.read_text().splitlines())))
    undo(finished, "first")
    undo(finished, "second")
    assert trained(finished) == expected


# --- What it tells ---------------------------------------------------------------------------------------------------


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
        ("turns", 8), ("answers", len(rows(project, "answers.jsonl"))), ("features", len(read(project))),
    ]  # fmt: skip
    trained(project)
    trained(project)
    assert {what for what, _, _ in told} >= {
        "prompts", "answers", "features", "training first", "training second", "evaluating chain", "evaluating d2sd",
    }  # fmt: skip
    assert [(what, total, done) for what, total, done in told if total is not None and done != total] == []


def read(project: Path) -> list[Response]:
    return read_responses(project / "work", vocab_size=64)


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
    assert done["features"].startswith(f"{len(read(finished))} sequences stored, 0.0 MB for the answers so far")
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
    result = train(project, "--plan")
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout.splitlines()


def test_events_for_tensorboard(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, list[tuple[str, float, int]]] = {}

    class Writer:
        def __init__(self, folder: Path, purge_step: int) -> None:
            self.scalars = kept.setdefault(f"{folder.name} from {purge_step}", [])
            self.add_scalar = lambda *told: self.scalars.append(told)

        def flush(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr("d2sd.train.pipeline.log.tensorboard_is_installed", lambda: True)
    undo(finished, "second")
    trained(finished)
    assert kept.keys() == {"second from 1"}, "a drafter that is trained writes nothing"
    said = kept["second from 1"]
    assert [(name, step) for name, _, step in said if name == "loss"] == [("loss", step) for step in (1, 2, 3, 4)]
    assert [step for name, _, step in said if name == "tau/d2sd"] == [3, 4]
    assert {"acceptance of d2sd/position 1", "calibration error of d2sd/second"} <= {name for name, _, _ in said}


# --- What it refuses -------------------------------------------------------------------------------------------------


def refused(project: Path) -> str:
    result = train(project)
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert not tree_bytes(project / "out")
    return result.stderr


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("drafter.layers", 4, "drafter.layers"),
        ("drafter.target_layer_ids", [0, 3], "drafter.target_layer_ids"),
        ("drafter.mask_token_id", 64, "drafter.mask_token_id"),
        ("data.prompts", [{"path": "none.jsonl"}], "none.jsonl"),
        ("data.prompts", [{"path": "prompts.jsonl"}, {"path": "prompts.jsonl"}], "same id"),
        ("data.exclude", ["none.jsonl"], "none.jsonl"),
        ("target.path", "nowhere", "nowhere"),
        ("first.stepz", 1, "first.stepz"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_before_any_answer(
    project: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, told: str
) -> None:
    monkeypatch.setattr(
        "d2sd.train.pipeline.responses.make_engine", lambda *args, **kwargs: pytest.fail("it began to answer")
    )
    edit(project, key, value)
    assert told in refused(project)


def test_writing_turns_needs_a_chat_template(project: Path) -> None:
    edit_json(project / "target" / "tokenizer_config.json", "chat_template", ...)
    assert "data.self_written" in refused(project)


def test_too_few_answers_to_hold_some_out(finished: Path) -> None:
    edit(finished, "data.held_out", 99)
    shutil.rmtree(finished / "out")
    assert "data.held_out" in refused(finished)


def test_a_damaged_answers_file_is_named_by_its_line(finished: Path) -> None:
    (finished / "work" / "answers.jsonl").write_text('{"id": "p1"}\n')
    shutil.rmtree(finished / "out")
    assert "answers.jsonl:1" in refused(finished)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("precision", "bf16", "the target changed"),
        ("target.path", "../project/target", "the target changed"),
        ("first.steps", 5, "the settings changed"),
        ("drafter.block_size", 3, "the drafter changed"),
        ("data.held_out", 4, "the data changed"),
        ("data.max_new_tokens", 12, "how the target is asked changed"),
        ("data.self_written", [{"name": "kind", "count": 8, "end": "w1"}], "self_written.kind.end"),
        ("data.self_written", [{"name": "kind", "count": 8, "temperature": 0.5}], "self_written.kind.temperature"),
    ],
)
def test_a_recipe_that_changed_on_the_way_is_refused(finished: Path, key: str, value: object, told: str) -> None:
    shutil.rmtree(finished / "out")
    edit(finished, key, value)
    for _ in range(2):  # the refusal leaves nothing that would let a second try pass
        assert told in refused(finished)


def test_a_full_disk_is_a_message(finished: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    shutil.rmtree(finished / "out")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert "disk filled up during the features" in refused(finished)
    assert trained(finished) == expected


def test_a_place_that_cannot_be_written_is_told_before_any_answer(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "d2sd.train.pipeline.responses.make_engine", lambda *args, **kwargs: pytest.fail("it began to answer")
    )
    (project / "out").write_text("a file")
    result = train(project)
    assert result.exit_code == 2
    assert str(project / "out") in result.stderr


# --- Several processes -----------------------------------------------------------------------------------------------


def test_two_processes_train_a_pair(project: Path, whole: tuple[Path, Result]) -> None:
    """Through torchrun: each answers its share, both train on theirs, one writes."""
    (project / "work").mkdir()
    shutil.copytree(whole[0] / "work" / "target", project / "work" / "target")
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script(project)],
        check=False, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert tree_bytes(project / "out").keys() == tree_bytes(whole[0] / "out").keys() - {"curves.png"}
    assert ended.stdout.count("tokens a step on 2 held-out prompts") == 3, "one process tells"
    for kind in ("turns", "answers"):
        shares = [{line["id"] for line in rows(project, f"{kind}{rank}.jsonl")} for rank in ("", "-1")]
        assert min(map(len, shares)) >= 3
        assert not shares[0] & shares[1]
    for name in ("first", "second"):
        ours, alone = (
            [row for row in rows(folder, f"{name}.jsonl") if "loss" in row] for folder in (project, whole[0])
        )
        assert [row["step"] for row in ours] == [1, 2, 3, 4]
        assert ours[0]["loss"] == pytest.approx(alone[0]["loss"], rel=0.01), "the same sequences"
