"""The answers: what an interruption leaves, the files of several processes, and every bad line by its number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from d2sd.errors import D2SDError
from d2sd.train.data.jsonl import append_row, append_to, own_file
from d2sd.train.data.responses import (
    EMPTY,
    KIND,
    Response,
    append_response,
    finished_ids,
    match_responses,
    read_responses,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def write(path: Path, *names: str) -> None:
    with append_to(path) as out:
        for name in names:
            append_response(out, name, (1, 2), [3, 4, 5])


def append(path: Path, line: str | bytes) -> None:
    with path.open("ab") as out:
        out.write((line.encode() if isinstance(line, str) else line) + b"\n")


def names(path: Path) -> list[str]:
    return [answer.id for answer in read_responses(path, vocab_size=6)]


def test_what_is_written_is_read_and_is_on_its_way_to_the_disk_at_once(path: Path) -> None:
    write(path, "a", "b")
    assert read_responses(path, vocab_size=6) == [Response("a", [1, 2], [3, 4, 5]), Response("b", [1, 2], [3, 4, 5])]
    with append_to(path) as out:
        append_response(out, "c", [1], [2, 3])
        assert finished_ids(path) == dict.fromkeys("abc")


@pytest.mark.parametrize("kept", [1, 12, -1])
def test_a_line_cut_short_is_left_out_then_cut_off_then_asked_again(path: Path, kept: int) -> None:
    write(path, "a", "b")
    whole = path.read_bytes()
    last = whole.index(b"\n") + 1
    cut = whole[:last] + whole[last:][:kept]
    path.write_bytes(cut)
    assert names(path) == ["a"]
    assert finished_ids(path) == {"a": None}
    assert path.read_bytes() == cut, "who reads does not write: another process may be appending"
    write(path)
    assert path.read_bytes() == whole[:last]
    write(path, "b")
    assert path.read_bytes() == whole
    assert finished_ids(path).keys() == {"a", "b"}


def test_nothing_is_finished_before_the_first_answer(path: Path) -> None:
    assert finished_ids(path) == finished_ids(path.parent) == {}
    for begun in ("", '{"id": "a", "prom'):
        path.write_text(begun)
        assert finished_ids(path) == finished_ids(path.parent) == {}
    write(path, "a")
    assert names(path) == ["a"]


# --- Several processes -----------------------------------------------------------------------------------------------


def test_a_folder_has_the_responses_of_every_process(tmp_path: Path) -> None:
    """Whatever is cut, and of however many processes an earlier run was."""
    for rank, name in enumerate(["a", "b", "c"]):
        write(own_file(tmp_path, KIND, rank), name, f"cut {name}")
        file = own_file(tmp_path, KIND, rank)
        file.write_bytes(file.read_bytes()[:-4])
    assert file.name == "answers-2.jsonl"
    write(own_file(tmp_path, KIND, 11), "d")
    for other in (
        "answers-old.jsonl",
        "answers-1-old.jsonl",
        "answers2.jsonl",
        "turns.jsonl",
        "turns-1.jsonl",
        "answers-1.json",
    ):
        (tmp_path / other).write_text("of somebody else\n")
    assert sorted(names(tmp_path)) == ["a", "b", "c", "d"]
    assert finished_ids(tmp_path) == dict.fromkeys("abcd")
    assert names(tmp_path / "answers-2.jsonl") == ["c"], "one file alone"


def test_an_answer_that_two_processes_gave_is_named(tmp_path: Path) -> None:
    write(own_file(tmp_path, KIND, 0), "a", "b")
    write(own_file(tmp_path, KIND, 3), "c", "b")
    told = r"same id twice(.|\n)*where: .*answers\.jsonl:2\n  found: b, also at .*answers-3\.jsonl:2"
    for read in (lambda: names(tmp_path), lambda: finished_ids(tmp_path)):
        with pytest.raises(D2SDError, match=told):
            read()


# --- Bad data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "",
        "[]",
        '"dropped"',
        '{"id": "b", "prompt_ids": [1]}',
        '{"id": 7, "prompt_ids": [1], "answer_ids": [2, 3]}',
        '{"id": "b", "prompt_ids": "12", "answer_ids": "34"}',
        '{"id": "b", "prompt_ids": ["1"], "answer_ids": [2, 3]}',
        '{"id": "b", "prompt_ids": [1.0], "answer_ids": [2, 3]}',
        '{"id": "b", "prompt_ids": [1], "answer_ids": [NaN, 3]}',
        '{"id": "b", "prompt_ids": [], "answer_ids": [2, 3]}',
        '{"id": "b", "prompt_ids": null, "answer_ids": [2, 3]}',
        '{"id": "b", "dropped": null}',
        '{"dropped": "too long"}',
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_no_answer_is_named(path: Path, line: str | bytes) -> None:
    write(path, "a")
    append(path, line)
    write(path, "c")
    for read in (lambda: names(path), lambda: finished_ids(path)):
        with pytest.raises(
            D2SDError, match=r"not one of the answers\n(  also: .*\n)*  where: .*answers\.jsonl:2(: [\w.]+)?\n"
        ):
            read()


@pytest.mark.parametrize("tokens", [([6, 1], [2, 3]), ([1, 2], [3, 6]), ([1, 2], [3, -1])])
def test_ids_of_another_tokenizer_are_refused(path: Path, tokens: tuple[list[int], list[int]]) -> None:
    write(path, "a")
    with append_to(path) as out:
        append_response(out, "b", *tokens)
    with pytest.raises(D2SDError, match=r"another tokenizer\n  where: .*answers\.jsonl:2\n"):
        read_responses(path, vocab_size=6)


def test_a_sequence_longer_than_the_recipe_allows_is_named(path: Path) -> None:
    write(path, "a")  # 5 tokens
    assert len(read_responses(path, vocab_size=6, max_tokens=5)) == 1
    with append_to(path) as out:
        append_response(out, "b", (1, 2, 3), [3, 4, 5])
    told = r"longer than(.|\n)*where: .*answers\.jsonl:2\n  found: b: 6 tokens\n  expected: at most 5\n"
    with pytest.raises(D2SDError, match=told):
        read_responses(path, vocab_size=6, max_tokens=5)


def test_a_missing_file_has_no_responses(path: Path) -> None:
    for text in (None, "", json.dumps({"id": "a", "prompt_ids": [1], "answer_ids": [2]}) + "\n"):
        if text is not None:
            path.write_text(text)
        for where in (path, path.parent):
            with pytest.raises(D2SDError, match=rf"no usable response\n  where: {where}\n"):
                read_responses(where, vocab_size=6)


# --- What is not trained on ------------------------------------------------------------------------------------------


def test_a_dropped_prompt_is_finished_says_why_and_is_no_answer(path: Path) -> None:
    write(path, "a")
    with append_to(path) as out:
        append_row(out, {"id": "b", "dropped": "too long"})
        append_response(out, "one token", [1, 2], [3])  # nothing follows its anchor
    assert finished_ids(path) == {"a": None, "b": "too long", "one token": EMPTY}
    assert json.loads(path.read_text().splitlines()[-1]) == {"id": "one token", "dropped": EMPTY}
    assert names(path) == ["a"]


@pytest.mark.parametrize(("prompt", "answer"), [([], []), ([1], [2])])
def test_what_older_files_dropped_stays_dropped(path: Path, prompt: list[int], answer: list[int]) -> None:
    write(path, "a")
    append(path, json.dumps({"id": "b", "prompt_ids": prompt, "answer_ids": answer}))
    assert finished_ids(path) == {"a": None, "b": EMPTY}
    assert names(path) == ["a"]


def test_responses_follow_the_order_of_the_prompts(path: Path) -> None:
    write(path, "a", "left out since", "b")
    answers = read_responses(path, vocab_size=6)
    chosen = match_responses({"b": (1, 2), "not answered": (1,), "a": (1, 2)}, answers)
    assert [answer.id for answer in chosen] == ["b", "a"]


@pytest.mark.parametrize("now", [(1, 3), (1, 2, 3), (1,)])
def test_an_answer_to_what_the_prompt_was_before_is_named(path: Path, now: tuple[int, ...]) -> None:
    write(path, "a", "b")
    read: Callable[[], object] = lambda: match_responses({"a": (1, 2), "b": now}, read_responses(path, vocab_size=6))  # noqa: E731
    with pytest.raises(D2SDError, match=r"a prompt changed since it was answered(.|\n)*found: b\n"):
        read()
