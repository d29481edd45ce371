"""`d2sd train` on a tiny target: what it leaves, that it resumes to the same bytes, and what it refuses before hours of
work.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from d2sd.cli.main import main
from d2sd.convert.drafter import check_drafter_tensors, check_fit, load_drafter, read_drafter_config
from d2sd.modeling.config import Role
from d2sd.train.answers import Answer, read_answers
from d2sd.train.loop import Trainer
from tests.convert.helpers import edit_json, set_key, tree_bytes, write_target_dir
from tests.tiny import greedy_text, tiny_decoder

PROMPTS = 9
STOP = 37
TEMPLATE = "{% for m in messages %}w60 {{ m['content'] }} w61 {% endfor %}{% if add_generation_prompt %}w62 {% endif %}"
SETTINGS = {"steps": 4, "batch": 2, "blocks": 4, "save_every": 2, "negatives": 8}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A target with a chat template that stops now and then, prompts, and a training recipe."""
    folder = tmp_path / "project"
    write_target_dir(folder / "target", tiny_decoder())
    settings = folder / "target" / "tokenizer_config.json"
    edit_json(settings, "chat_template", TEMPLATE)
    edit_json(settings, "eos_token", f"w{STOP}")  # a special token is found inside longer words, as w2 is in w20
    (folder / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP}))
    lines = [{"id": f"p{i}", "turns": [f"w{i} w{i + 20} w{i + 40}", "ignored"]} for i in range(PROMPTS)]
    lines.append({"id": "long", "turns": ["w1 " * 20]})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {
        "d2sd_train": 1,
        "name": "tiny",
        "target": {"path": "target"},
        "precision": "fp32",
        "max_batch": 4,
        "drafter": {"layers": 1, "block_size": 4, "mask_token_id": 63, "target_layer_ids": [0, 1]},
        "data": {
            "prompts": [{"path": "prompts.jsonl"}],
            "self_written": {"count": 8, "openings": ["w7 ", "w8 w9 "], "max_tokens": 9},
            "max_prompt_tokens": 16,
            "max_new_tokens": 8,
            "held_out": 2,
        },
        "first": SETTINGS,
        "second": SETTINGS,
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def edit(project: Path, key: str, value: object) -> None:
    """Set a dotted key of the recipe; ... deletes it."""
    path = project / "train.yaml"
    values = yaml.safe_load(path.read_text())
    set_key(values, key, value)
    path.write_text(yaml.safe_dump(values))


def train(project: Path) -> Result:
    arguments = ["train", project / "train.yaml", "--work", project / "work", "--out", project / "out"]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def trained(project: Path) -> dict[str, bytes]:
    result = train(project)
    assert result.exit_code == 0, result.output
    return tree_bytes(project / "out")


def lines(project: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project / "work" / "answers.jsonl").read_text().splitlines()]


def test_end_to_end(project: Path) -> None:
    result = train(project)
    assert result.exit_code == 0, result.output
    assert "teacher-forced tau on 2 held-out answers: " in result.stdout
    assert sorted(tree_bytes(project / "out")) == [
        f"{name}/{file}" for name in ("first", "second") for file in ("config.json", "model.safetensors")
    ]
    roles: dict[str, Role] = {"first": "first", "second": "variable_prefix"}
    drafters = []
    for name, role in roles.items():
        folder = project / "out" / name
        config = read_drafter_config(folder)
        check_fit(config, tiny_decoder().config, role=role, block_size=4, where=folder)
        check_drafter_tensors(folder, config)
        drafters.append(torch.cat([p.flatten() for p in load_drafter(folder, torch.bfloat16).parameters()]))
        log = [line.split(",") for line in (project / "work" / f"{name}.csv").read_text().splitlines()]
        assert [int(step) for step, _ in log] == [1, 2, 3, 4]
        assert all(0 < float(loss) < 50 for _, loss in log)
    assert drafters[0].isfinite().all()
    assert not torch.equal(*drafters), "the second one has been trained further"


def test_answers_are_the_targets_and_every_prompt_leaves_one_line(project: Path) -> None:
    trained(project)
    found = {line["id"]: line for line in lines(project)}
    assert sorted(found) == sorted([*(f"p{i}" for i in range(PROMPTS)), "long", *(f"self/{i}" for i in range(8))])
    assert found["long"]["answer_ids"] == [], "20 tokens are more than max_prompt_tokens"
    decoder = tiny_decoder()
    for i in range(PROMPTS):
        line = found[f"p{i}"]
        assert line["prompt_ids"] == [60, i, i + 20, i + 40, 61, 62]
        said = greedy_text(decoder, line["prompt_ids"], 8)
        stops = [place for place, token in enumerate(said, 1) if token == STOP]
        assert line["answer_ids"] == said[: stops[0] if stops else 8]
    written = [line for name, line in found.items() if name.startswith("self/")]
    kept = [line for line in written if line["answer_ids"]]
    assert 0 < len(kept) < len(written), "turns that did not end are dropped"
    for line in kept:
        ids = line["prompt_ids"]
        assert ids[:2] == [60, 7] or ids[:3] == [60, 8, 9]
        assert ids[-2:] == [61, 62]
        assert STOP not in ids, "what ended the turn is not part of its text"
        assert line["answer_ids"][:4] == greedy_text(decoder, ids, 4)[: len(line["answer_ids"])]


def test_a_second_run_asks_and_trains_nothing_and_writes_the_same_bytes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, answers = trained(project), (project / "work" / "answers.jsonl").read_bytes()

    def refuse(*args: object, **kwargs: object) -> Any:
        raise AssertionError("it was done before")

    monkeypatch.setattr(Trainer, "_update", refuse)
    monkeypatch.setattr("d2sd.runtime.engine.Engine.submit", refuse)
    assert trained(project) == first
    assert (project / "work" / "answers.jsonl").read_bytes() == answers


def test_without_a_second_drafter(project: Path) -> None:
    edit(project, "second", ...)
    assert {name.split("/")[0] for name in trained(project)} == {"first"}


# --- Interruptions ---------------------------------------------------------------------------------------------------


@pytest.fixture
def expected(project: Path) -> dict[str, bytes]:
    """The bytes of an uninterrupted run; the project is as if it had never run."""
    found = trained(project)
    (project / "work").rename(project / "work of the uninterrupted run")
    (project / "out").rename(project / "out of the uninterrupted run")
    return found


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
    ("name", "number"),
    [
        pytest.param("d2sd.runtime.engine.Engine.step", 6, id="answering"),
        pytest.param("d2sd.train.answers.append_answer", 7, id="writing an answer"),
        pytest.param("d2sd.train.features.FeatureCache.__init__", 1, id="behind the features"),
        pytest.param("d2sd.train.loop.Trainer._update", 4, id="training the first"),
        pytest.param("d2sd.train.loop.save_file", 3, id="saving the second"),
        pytest.param("d2sd.convert.drafter.write_tensors", 2, id="writing the second"),
    ],
)
def test_interrupted_anywhere_it_ends_in_the_same_bytes(
    project: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """Also while answering, when answers come in another order."""
    import importlib

    holder, attribute = name.rsplit(".", 1)
    try:
        owner: Any = importlib.import_module(holder)
    except ModuleNotFoundError:
        module, cls = holder.rsplit(".", 1)
        owner = getattr(importlib.import_module(module), cls)
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, nth_time(getattr(owner, attribute), number))
        result = train(project)
        assert result.exit_code == 130, result.output
        assert "interrupted" in result.stderr
    assert trained(project) == expected


def test_killed_by_the_kernel_in_the_middle_of_training_it_resumes(project: Path, expected: dict[str, bytes]) -> None:
    program = f"""
import os, signal, sys
from d2sd.cli.main import main
from d2sd.train.loop import Trainer
real, calls = Trainer._update, []
def update(self, generator):
    calls.append(None)
    if len(calls) == 8:  # the second drafter's last step
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, generator)
Trainer._update = update
main(["train", "{project}/train.yaml", "--work", "{project}/work", "--out", "{project}/out"])
"""
    killed = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (project / "work" / "second" / "state.safetensors").is_file()
    assert trained(project) == expected


def test_a_cut_answer_is_asked_again(project: Path, expected: dict[str, bytes]) -> None:
    trained(project)
    path = project / "work" / "answers.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    (project / "work" / "first").rename(project / "gone")
    assert trained(project) == expected
    assert path.read_bytes() == whole


def test_the_order_of_the_answers_is_the_recipes_not_the_files(project: Path, expected: dict[str, bytes]) -> None:
    """Short answers finish early, and the first ones are held out; an interruption changes what finishes when."""
    trained(project)
    path = project / "work" / "answers.jsonl"
    path.write_text("".join(line + "\n" for line in reversed(path.read_text().splitlines())))
    for name in ("first", "second"):
        (project / "work" / name / "state.safetensors").unlink()
    assert trained(project) == expected


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
    assert [(what, total) for what, total, done in told if what in ("answers", "features")] == [
        ("answers", PROMPTS + 1 + 8), ("features", len(read(project))),
    ]  # fmt: skip
    trained(project)
    trained(project)
    assert {what for what, _, _ in told} >= {"answers", "features", "training first", "training second"}
    assert [(what, total, done) for what, total, done in told if total is not None and done != total] == []


def read(project: Path) -> list[Answer]:
    return read_answers(project / "work" / "answers.jsonl", vocab_size=64)


# --- What it refuses -------------------------------------------------------------------------------------------------


def refused(project: Path) -> str:
    result = train(project)
    assert result.exit_code == 2, result.output
    assert not (project / "out").exists()
    return result.stderr


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("drafter.layers", 4, "drafter.layers"),
        ("drafter.target_layer_ids", [0, 3], "drafter.target_layer_ids"),
        ("drafter.mask_token_id", 64, "drafter.mask_token_id"),
        ("data.prompts", [{"path": "none.jsonl"}], "none.jsonl"),
        ("data.prompts", [{"path": "prompts.jsonl"}, {"path": "prompts.jsonl"}], "same id"),
        ("target.path", "nowhere", "nowhere"),
        ("first.stepz", 1, "first.stepz"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_before_any_answer(
    project: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, told: str
) -> None:
    monkeypatch.setattr("d2sd.cli.serving.make_engine", lambda *args, **kwargs: pytest.fail("it began to answer"))
    edit(project, key, value)
    assert told in refused(project)


def test_writing_turns_needs_a_chat_template(project: Path) -> None:
    edit_json(project / "target" / "tokenizer_config.json", "chat_template", ...)
    assert "data.self_written" in refused(project)
    edit(project, "data.self_written", ...)
    trained(project)


def test_too_few_answers_to_hold_some_out(project: Path) -> None:
    edit(project, "data.held_out", 99)
    assert "data.held_out" in refused(project)


def test_a_damaged_answers_file_is_named_by_its_line(project: Path) -> None:
    (project / "work").mkdir()
    (project / "work" / "answers.jsonl").write_text('{"id": "p1"}\n')
    assert "answers.jsonl:1" in refused(project)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("precision", "bf16", "the target changed"),
        ("target.path", "../project/target", "the target changed"),
        ("first.steps", 5, "the settings changed"),
        ("drafter.block_size", 3, "the drafter changed"),
    ],
)
def test_a_recipe_that_changed_on_the_way_is_refused(project: Path, key: str, value: object, told: str) -> None:
    trained(project)
    (project / "out").rename(project / "out before")
    edit(project, key, value)
    for _ in range(2):  # the refusal leaves nothing that would let a second try pass
        assert told in refused(project)


def test_a_full_disk_is_a_message(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert "disk filled up during the features" in refused(project)
    trained(project)
