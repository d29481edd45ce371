"""The programs that make the public prompt sets: every set has one, and a row is as `made` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.prompts import documents, questions
from d2sd.prompt_sets import prompt_sets


def test_a_program_makes_every_set() -> None:
    made = {*questions.FILES, *(f"train/{name}" for name in documents.FILES)}
    assert made == {one.file for one in prompt_sets()}


def test_functions_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"task_id": n, "text": f"Write {n}.", "test_list": ["assert f()", "assert g()"]} for n in (846, 847)]
    monkeypatch.setattr(questions, "_rows", lambda *source: rows)
    (learnt,) = questions.FILES["train/mbpp.jsonl"](Path())
    (measured,) = questions.FILES["eval/mbpp.jsonl"](Path())
    told = "Write {}.\nYour code should pass these tests:\nassert f()\nassert g()"
    assert learnt == {"id": "mbpp/846", "turns": [told.format(846)]}
    assert measured == {"id": "mbpp/847", "turns": [told.format(847) + "\n"]}


def test_the_last_questions_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = [{"question_id": n, "category": kind, "turns": []} for kind in questions.KINDS for n in range(80)]
    monkeypatch.setattr(questions, "_rows", lambda *source: rows)
    numbers = [row["id"] for row in questions.spec_bench(Path())]
    assert numbers == [f"spec_bench/{n}" for n in range(60, 80)] * 4
