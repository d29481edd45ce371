"""The answers file and the prompts behind it: what an interruption leaves, and every bad line by its number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from d2sd.errors import D2SDError
from d2sd.train.answers import Answer, append_answer, finished_ids, read_answers
from d2sd.train.prompts import plan_prompts
from d2sd.train_recipe import Data, SelfWritten


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def write(path: Path, *names: str) -> None:
    with path.open("a") as out:
        for name in names:
            append_answer(out, name, (1, 2), [3, 4, 5])


def test_what_is_written_is_read(path: Path) -> None:
    write(path, "a", "b")
    assert read_answers(path, vocab_size=6) == [Answer("a", [1, 2], [3, 4, 5]), Answer("b", [1, 2], [3, 4, 5])]


def test_every_answer_is_on_its_way_to_the_disk_at_once(path: Path) -> None:
    with path.open("a") as out:
        append_answer(out, "a", [1], [2, 3])
        assert finished_ids(path) == {"a"}


@pytest.mark.parametrize("kept", [1, 12, -1])
def test_a_line_cut_short_is_left_out_then_cut_off_then_asked_again(path: Path, kept: int) -> None:
    write(path, "a", "b")
    whole = path.read_bytes()
    last = whole.index(b"\n") + 1
    path.write_bytes(whole[:last] + whole[last:][:kept])
    assert [answer.id for answer in read_answers(path, vocab_size=6)] == ["a"]
    assert finished_ids(path) == {"a"}
    assert path.read_bytes() == whole[:last]
    write(path, "b")
    assert path.read_bytes() == whole
    assert finished_ids(path) == {"a", "b"}


def test_nothing_is_finished_before_the_first_answer(path: Path) -> None:
    assert finished_ids(path) == set()
    path.touch()
    assert finished_ids(path) == set()


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "",
        "[]",
        '"text"',
        '{"id": "b", "prompt_ids": [1]}',
        '{"id": 7, "prompt_ids": [1], "answer_ids": [2, 3]}',
        '{"id": "b", "prompt_ids": "12", "answer_ids": "34"}',
        '{"id": "b", "prompt_ids": ["1"], "answer_ids": [2, 3]}',
        '{"id": "b", "prompt_ids": [1.0], "answer_ids": [2, 3]}',
        '{"id": "b", "prompt_ids": [], "answer_ids": [2, 3]}',
        '{"id": "b", "prompt_ids": null, "answer_ids": [2, 3]}',
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_no_answer_is_named(path: Path, line: str | bytes) -> None:
    write(path, "a")
    with path.open("ab") as out:
        out.write((line.encode() if isinstance(line, str) else line) + b"\n")
    write(path, "c")
    for read in (lambda: read_answers(path, vocab_size=6), lambda: finished_ids(path)):
        with pytest.raises(D2SDError, match=r"not an answer\n  where: .*answers\.jsonl:2\n"):
            read()


@pytest.mark.parametrize("tokens", [([6, 1], [2, 3]), ([1, 2], [3, 6]), ([1, 2], [3, -1])])
def test_ids_of_another_tokenizer_are_refused(path: Path, tokens: tuple[list[int], list[int]]) -> None:
    write(path, "a")
    with path.open("a") as out:
        append_answer(out, "b", *tokens)
    with pytest.raises(D2SDError, match=r"another tokenizer\n  where: .*answers\.jsonl:2\n"):
        read_answers(path, vocab_size=6)


def test_no_file_no_answers(path: Path) -> None:
    with pytest.raises(D2SDError, match=r"answers\.jsonl"):
        read_answers(path, vocab_size=6)
    for text in ("", json.dumps({"id": "a", "prompt_ids": [1], "answer_ids": [2]}) + "\n"):  # one token is no use
        path.write_text(text)
        with pytest.raises(D2SDError, match=r"no usable answer\n  where: .*answers\.jsonl"):
            read_answers(path, vocab_size=6)


def test_a_dropped_prompt_is_finished_and_no_answer(path: Path) -> None:
    write(path, "a")
    with path.open("a") as out:
        append_answer(out, "dropped", (), ())
    assert finished_ids(path) == {"a", "dropped"}
    assert [answer.id for answer in read_answers(path, vocab_size=6)] == ["a"]


# --- Prompts ---------------------------------------------------------------------------------------------------------

FILE = [(f"p{i}", f"turn {i}") for i in range(30)]


def data(**keys: object) -> Data:
    return Data.model_validate({"prompts": []} | keys)


def test_a_plan_is_a_shuffle_that_its_seed_decides() -> None:
    own = SelfWritten(count=10, openings=["Write", ""])
    jobs = plan_prompts([(FILE, 20), (FILE[:0], None)], data(self_written=own))
    assert jobs == plan_prompts([(FILE, 20), ([], None)], data(self_written=own))
    assert jobs != plan_prompts([(FILE, 20), ([], None)], data(self_written=own), seed=1)
    written = [job for job in jobs if job.written]
    assert len({job.id for job in written}) == 20
    assert {(job.id, job.text) for job in written} <= set(FILE)
    openings = [job for job in jobs if not job.written]
    assert sorted(job.id for job in openings) == sorted(f"self/{i}" for i in range(10))
    assert {job.text for job in openings} == {"Write", ""}
    assert any(not job.written for job in jobs[:15]), "kinds are mixed"


def test_no_count_means_all_and_too_large_a_count_too() -> None:
    assert len(plan_prompts([(FILE, None)], data())) == 30
    assert len(plan_prompts([(FILE, 99)], data())) == 30


def test_an_id_that_two_prompts_share_is_refused() -> None:
    with pytest.raises(D2SDError, match=r"same id(.|\n)*p0"):
        plan_prompts([(FILE, None), (FILE[:1], None)], data())
