"""Sets of questions, made from public repositories, for training and for measuring:

    python -m benchmarks.prompts.questions REPOSITORIES data

REPOSITORIES holds a clone of each, bare or not, in a folder of the repository's own name (`SOURCES`). Each file is
JSONL of {id, turns}, whose hash `d2sd data` knows. Sets whose repository is missing are left out, and named.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.prompts.documents import Repository
from d2sd.errors import D2SDError
from d2sd.io import sha256, write_text
from d2sd.prompt_sets import prompt_sets

#: The commits that the sets were made of; of the largest repository any that has the file.
SOURCES = {
    "grade-school-math": "3101c7d5072418e28b9008a6636bde82a006892c",
    "human-eval": "6d43fb980f9fee3c892a914eda09951f772ad10d",
    "google-research": "HEAD",
    "Spec-Bench": "fd2c1cd7d2201ef71db4c5f4e455008f017967bf",
    "self-instruct": "0b26ccaa415992100fa32df62d41b994cf928e23",
}
#: Kinds of Spec-Bench that are measured, and questions of each.
KINDS, EACH = ("translation", "summarization", "qa", "rag"), 20

Row = dict[str, Any]


def _rows(folder: Path, name: str, path: str) -> list[Any]:
    repository = Repository(folder, name, SOURCES[name])
    data = repository.read(path)
    return [json.loads(line) for line in (gzip.decompress(data) if path.endswith(".gz") else data).splitlines()]


def grade_school(folder: Path, part: str, name: str, count: int | None) -> Iterator[Row]:
    """Questions of GSM8K."""
    for number, row in enumerate(_rows(folder, "grade-school-math", f"grade_school_math/data/{part}.jsonl")[:count]):
        yield {"id": f"{name}/{number}", "turns": [row["question"]]}


def human_eval(folder: Path) -> Iterator[Row]:
    """The first hundred functions to complete."""
    for row in _rows(folder, "human-eval", "data/HumanEval.jsonl.gz")[:100]:
        yield {"id": row["task_id"], "turns": [row["prompt"]]}


def mbpp(folder: Path, tasks: range, end: str) -> Iterator[Row]:
    """Functions to write, with their tests."""
    for row in _rows(folder, "google-research", "mbpp/mbpp.jsonl"):
        if row["task_id"] in tasks:
            lines = [row["text"], "Your code should pass these tests:", *row["test_list"]]
            yield {"id": f"mbpp/{row['task_id']}", "turns": ["\n".join(lines) + end]}


def mt_bench(folder: Path) -> Iterator[Row]:
    """MT-Bench, as Spec-Bench has it."""
    for row in _spec_bench(folder):
        if 81 <= row["question_id"] <= 160:
            yield _row("mt_bench", row)


def spec_bench(folder: Path) -> Iterator[Row]:
    """The last questions of some kinds."""
    rows = _spec_bench(folder)
    for kind in KINDS:
        yield from (_row("spec_bench", row) for row in [row for row in rows if row["category"] == kind][-EACH:])


def _spec_bench(folder: Path) -> list[Any]:
    return _rows(folder, "Spec-Bench", "data/spec_bench/question.jsonl")


def _row(name: str, row: Any) -> Row:
    return {"id": f"{name}/{row['question_id']}", "category": row["category"], "turns": row["turns"]}


def seeds(folder: Path) -> Iterator[Row]:
    """Instructions of Self-Instruct, each with its first input."""
    for row in _rows(folder, "self-instruct", "data/seed_tasks.jsonl"):
        parts = [row["instruction"], row["instances"][0]["input"]]
        yield {"id": row["id"], "turns": ["\n".join(part for part in parts if part)]}


FILES: dict[str, Callable[[Path], Iterator[Row]]] = {
    "eval/gsm8k.jsonl": lambda folder: grade_school(folder, "test", "gsm8k", 128),
    "eval/humaneval.jsonl": human_eval,
    "eval/mbpp.jsonl": lambda folder: mbpp(folder, range(847, 911), "\n"),
    "eval/mt_bench.jsonl": mt_bench,
    "eval/spec_bench.jsonl": spec_bench,
    "train/gsm8k.jsonl": lambda folder: grade_school(folder, "train", "gsm8k-train", None),
    "train/mbpp.jsonl": lambda folder: mbpp(folder, range(1, 847), ""),
    "train/self_instruct_seeds.jsonl": seeds,
}


@click.command()
@click.argument("repositories", type=click.Path(path_type=Path))
@click.argument("data", type=click.Path(path_type=Path))
def main(repositories: Path, data: Path) -> None:
    """Write the sets, and say which are not the known ones."""
    expected = {one.file: one.sha256 for one in prompt_sets()}
    for file, make in FILES.items():
        try:
            rows = list(make(repositories))
        except D2SDError as error:
            click.echo(f"{data / file}: not made: {error.what} ({error.where})")
            continue
        path = data / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        click.echo(f"{path}: {len(rows):,} prompts{'' if sha256(path) == expected[file] else ', ANOTHER HASH'}")


if __name__ == "__main__":
    main()
