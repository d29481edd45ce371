"""Turns made of documents: every template and field is used as it is written, and no document twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from d2sd.errors import D2SDError
from d2sd.train.data.decontaminate import PromptFilter
from d2sd.train.data.documents import document_turns
from d2sd.train.data.prompts import Job
from d2sd.train.pipeline.responses import planned_jobs
from d2sd.train_recipe import Documents, load_train_recipe

TEXTS = [(f"d{i}", {"text": f"body {i} {{braces}}", "title": f"title {i}"}) for i in range(40)]
ASKED = [(f"q{i}", {"text": f"answer {i}", "title": f"about {i}", "question": f"why {i}?"}) for i in range(10)]
FILES = {"a": [*TEXTS, *ASKED], "b": TEXTS[:3]}


def kind(**keys: object) -> Documents:
    return Documents.model_validate({"name": "kind", "path": "a", "count": 5, "templates": ["Shorten: {text}"]} | keys)


def test_a_turn_is_a_template_with_the_fields_of_a_document() -> None:
    templates = ["{title}: {text}", '{{"a": 1}} {text}']
    turns = document_turns([kind(path="b", count=3, templates=templates)], FILES)
    assert {name for name, _ in turns} == {"kind/d0", "kind/d1", "kind/d2"}
    for name, text in turns:
        number = name.removeprefix("kind/d")
        body = f"body {number} {{braces}}"
        assert text in (f"title {number}: {body}", f'{{"a": 1}} {body}')


def test_templates_are_drawn_by_the_id_alone() -> None:
    templates = ["a {text}", "b {text}", "c {text}"]
    turns = document_turns([kind(count=40, templates=templates)], FILES)
    assert {text[0] for _, text in turns} == set("abc")
    few = document_turns([kind(count=7, templates=templates)], {"a": FILES["a"][::-1]})
    assert few == turns[:7], "neither the count nor the order of the file matters"


def test_kinds_of_one_file_share_it_out() -> None:
    kinds = [kind(count=20), kind(name="other", count=20, templates=["Say {text}"])]
    used = Counter(name.split("/")[1] for name, _ in document_turns(kinds, FILES))
    assert len(used) == 40
    assert set(used.values()) == {1}


def test_several_documents_are_numbered_around_the_one_that_is_asked_about() -> None:
    asked = kind(count=8, passages=3, templates=["{passages}\n{question}"], passage="[{number}] {text}")
    turns = document_turns([asked], FILES)
    places = set()
    for name, text in turns:
        number = name.removeprefix("kind/q")
        *passages, question = text.replace("\n\n", "\n").split("\n")
        assert question == f"why {number}?"
        assert [passage[:4] for passage in passages] == ["[1] ", "[2] ", "[3] "]
        places.add([passage[4:] for passage in passages].index(f"answer {number}"))
        assert sum("body" in passage for passage in passages) == 2, "others are documents without a question"
    assert len(places) > 1


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"count": 51}, "50 left with {text}"),
        ({"templates": ["{text} {author}"]}, "0 left with {author}, {text}"),
        ({"count": 11, "templates": ["{text} {question}"]}, "10 left with {question}, {text}"),
        ({"count": 10, "passages": 6, "templates": ["{passages} {question}"]}, "and 50 others with {text}"),
    ],
)
def test_too_few_documents_are_an_error_that_names_the_kind(keys: dict[str, object], told: str) -> None:
    with pytest.raises(D2SDError, match=r"data\.documents: kind") as raised:
        document_turns([kind(**keys)], FILES)
    assert told in str(raised.value)


def test_common_words_of_a_template_make_no_near_duplicates() -> None:
    words = [[f"w{i}x{j}" for j in range(12)] for i in range(50)]
    files = {"a": [(f"d{i}", {"text": " ".join(text)}) for i, text in enumerate(words)]}
    template = "Read the following text with care and answer in one or two sentences.\n\n{text}"
    turns = document_turns([kind(count=50, templates=[template])], files)
    kept, _ = PromptFilter([]).judge([Job(name, text) for name, text in turns])
    assert len(kept) == 50


def test_turns_of_documents_are_planned_with_the_other_prompts(tmp_path: Path) -> None:
    documents = "".join(json.dumps({"id": name, **fields}) + "\n" for name, fields in ASKED)
    (tmp_path / "documents.jsonl").write_text(documents)
    (tmp_path / "prompts.jsonl").write_text('{"id": "p", "turns": ["Hello you"]}\n')
    kinds = [kind(path="documents.jsonl"), kind(name="questions", path="documents.jsonl", templates=["{question}"])]
    recipe = {
        "d2sd_train": 1,
        "name": "tiny",
        "target": {"path": "target"},
        "drafter": {"layers": 2, "block_size": 4, "mask_token_id": 63, "target_layer_ids": [0, 1]},
        "data": {"prompts": [{"path": "prompts.jsonl"}], "documents": [each.model_dump() for each in kinds]},
        "first": {"steps": 10, "objective": {"ce": 1}},
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(recipe))
    jobs = planned_jobs(load_train_recipe(tmp_path / "train.yaml"))
    assert Counter(job.id.split("/")[0] for job in jobs) == {"p": 1, "kind": 5, "questions": 5}
    assert all(job.kind is None for job in jobs)
