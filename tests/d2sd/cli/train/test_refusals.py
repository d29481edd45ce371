"""`d2sd train` refuses bad input before hours of work."""

from __future__ import annotations

import json
import random
import shutil
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import fuzz_inputs
from d2sd.io import MARKER
from tests.commands import refused
from tests.convert.helpers import edit_json, tree_bytes
from tests.d2sd.cli.train.helpers import add_documents_and_heads, edit, refusal, train, trained


@pytest.fixture
def no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be answered."""
    monkeypatch.setattr("d2sd.train.pipeline.responses.make_engine", lambda *_, **__: pytest.fail("it began to answer"))


@pytest.mark.usefixtures("no_answers")
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
    project: Path, key: str, value: object, told: str
) -> None:
    edit(project, key, value)
    assert told in refusal(project)


def test_writing_turns_needs_a_chat_template(project: Path) -> None:
    edit_json(project / "target" / "tokenizer_config.json", "chat_template", ...)
    assert "data.self_written" in refusal(project)


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("answers.jsonl", b'{"id": "p1"}\n', "answers.jsonl:1"),
        *(("asked.json", damage, "asked.json") for damage in (b"[]", b"{", b"\xff")),
    ],
)
def test_damaged_responses_and_their_settings_are_named(finished: Path, name: str, damage: bytes, told: str) -> None:
    (finished / "work" / name).write_bytes(damage)
    shutil.rmtree(finished / "out")
    assert told in refusal(finished)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("precision", "bf16", "the target changed"),
        ("target.path", "../project/target", "the target changed"),
        ("first.steps", 5, "the settings changed"),
        ("drafter.block_size", 3, "the drafter changed"),
        ("data.held_out", 4, "the data changed"),
        ("data.held_out", 99, "data.held_out"),
        ("data.max_new_tokens", 12, "the sampling settings of the target changed"),
        ("data.self_written", [{"name": "kind", "count": 8, "end": "w1"}], "self_written.kind.end"),
        ("data.self_written", [{"name": "kind", "count": 8, "temperature": 0.5}], "self_written.kind.temperature"),
    ],
)
def test_a_recipe_that_changed_on_the_way_is_refused(finished: Path, key: str, value: object, told: str) -> None:
    shutil.rmtree(finished / "out")
    edit(finished, key, value)
    for _ in range(2):  # the refusal leaves nothing that would let a second try pass
        assert told in refusal(finished)


@pytest.mark.usefixtures("no_answers")
def test_an_unwritable_folder_is_refused_before_any_response(project: Path) -> None:
    (project / "out").write_text("a file")
    refused(train(project), str(project / "out"))


@pytest.mark.usefixtures("no_answers")
def test_what_another_training_wrote_is_not_replaced(finished: Path) -> None:
    before = tree_bytes(finished / "out")
    edit(finished, "first.steps", 5)
    refused(train(finished), "error: The folder belongs to another run.")
    (finished / "out" / MARKER).unlink()
    refused(train(finished), "error: The folder holds files that this run did not write.")
    assert tree_bytes(finished / "out") == {name: before[name] for name in before.keys() - {MARKER}}


DAMAGE = [
    b"[]\n",
    b"null\n",
    b"{}\n",
    b"7\n",
    b'"x"\n',
    b"{\n",
    b"\xff\n",
    b"[" * 5000 + b"\n",
    b'{"id": 1' + b"0" * 5000 + b"}\n",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    ["answers.jsonl", "turns.jsonl", "first.jsonl", "second.jsonl", "pace.jsonl", "screened.json", "features.json"],
)
def test_a_damaged_work_file_is_named_by_the_plan(finished: Path, name: str) -> None:
    for damage in DAMAGE:
        (finished / "work" / name).write_bytes(damage)
        result = train(finished, "--plan")
        assert (result.exit_code, type(result.exception)) == (2, SystemExit), (damage, result.exception)
        assert name in result.stderr, damage


@pytest.mark.parametrize("key", ["step", "cells", "loss", "seconds"])
def test_a_line_of_a_log_with_a_bad_value_is_named(finished: Path, key: str) -> None:
    log = finished / "work" / "first.jsonl"
    lines = log.read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if f'"{key}"' in line)
    lines[index] = json.dumps({**json.loads(lines[index]), key: "x"})
    log.write_text("\n".join(lines) + "\n")
    refused(train(finished, "--plan"), f"first.jsonl:{index + 1}: {key}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", [b"[]", b"{", b"\xff", b'{"inputs": 1}'])
def test_a_damaged_evaluation_is_measured_again(finished: Path, expected: dict[str, bytes], damage: bytes) -> None:
    (finished / "work" / "evaluation.json").write_bytes(damage)
    assert trained(finished) == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(2))
def test_a_damaged_training_is_a_plan_or_a_message(project: Path, seed: int) -> None:
    add_documents_and_heads(project)
    recipe = project / "train.yaml"
    assert fuzz_inputs.fault_of("train", str(recipe), "--plan", "--out", f"{project}/out") is None
    assert [fault for fault in islice(fuzz_inputs.training(recipe, random.Random(seed)), 25) if fault] == []
