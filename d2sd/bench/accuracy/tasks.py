"""The tasks of `d2sd eval`: documents from the local prompt sets, and what lm-eval is to do with them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from d2sd.errors import D2SDError
from d2sd.prompt_sets import present
from d2sd.prompts import read_prompts, read_rows
from d2sd.yaml_reader import read_yaml

TaskName = Literal["gsm8k", "gsm8k_choice", "gsm8k_perplexity"]
NAMES: tuple[TaskName, ...] = get_args(TaskName)

#: Metric of lm-eval -> its name in the table.
METRICS: Mapping[TaskName, Mapping[str, str]] = {
    "gsm8k": {
        "exact_match,strict-match": "exact match, strict",
        "exact_match,flexible-extract": "exact match, flexible",
    },
    "gsm8k_choice": {"acc,none": "accuracy"},
    "gsm8k_perplexity": {"bits_per_byte,none": "bits per byte", "word_perplexity,none": "word perplexity"},
}

_SET = "eval/gsm8k.jsonl"
#: GSM8K's test set as published, with the answers that the prompt set leaves out.
_ANSWERS = "eval/gsm8k_test.jsonl"
_FIX = "copy it from https://github.com/openai/grade-school-math: grade_school_math/data/test.jsonl"

_CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}],
}
_PERPLEXITY: dict[str, Any] = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
}


def documents(data: Path, tasks: Collection[TaskName]) -> list[dict[str, Any]]:
    """Each question; for tasks that need them also its `answer`, four `choices` and the right one's index `label`.

    Raises D2SDError if the folder `data` lacks the prompt set or the published answers, or holds another file.
    """
    path = data / _SET
    if _SET not in present(data):
        raise D2SDError(
            "The prompt set of this task is not there." if not path.exists() else "This is not the prompt set.",
            where=path, fix="fill the folder with d2sd data --from FOLDER; d2sd data prints the sources",
        )  # fmt: skip
    questions = [text for _, text in read_prompts(path)]
    if not set(tasks) - {"gsm8k_perplexity"}:
        return [{"question": question} for question in questions]
    answers = _answers(data / _ANSWERS)
    if missing := [question for question in questions if question not in answers]:
        raise D2SDError("A question has no published answer.", where=data / _ANSWERS, found=missing[0], fix=_FIX)
    return [
        {"question": question, "answer": str(answers[question]), "choices": choices, "label": index % 4}
        for index, question in enumerate(questions)
        for choices in [_choices(answers[question], index)]
    ]


def _answers(path: Path) -> dict[str, int]:
    """Question -> final answer, the number after "####"."""
    if not path.exists():
        raise D2SDError("The answers to GSM8K's questions are not there.", where=path, fix=_FIX)
    found = {}
    for where, row in read_rows(path):
        question, answer = row.get("question"), row.get("answer")
        number = re.search(r"#### *(-?[0-9,]+)\s*$", answer) if isinstance(answer, str) else None
        if not isinstance(question, str) or number is None:
            raise D2SDError(
                "Not a row of GSM8K.", where=where, expected='{"question": "…", "answer": "… #### 18"}', fix=_FIX
            )
        found[question] = int(number[1].replace(",", ""))
    return found


def config(task: TaskName, lm_eval_tasks: Path) -> dict[str, Any]:
    """lm-eval's configuration of a task, without its data; `lm_eval_tasks` is the folder of lm-eval's own tasks.

    `gsm8k` is lm-eval's `gsm8k_cot`: its eight examples, answer patterns and metric.
    """
    if task == "gsm8k":
        own = read_yaml(lm_eval_tasks / "gsm8k" / "gsm8k-cot.yaml")
        return {key: value for key, value in own.items() if key not in ("dataset_path", "dataset_name", "tag")}
    return _CHOICE if task == "gsm8k_choice" else _PERPLEXITY


def _choices(answer: int, index: int) -> list[str]:
    """The answer and three wrong ones of about its size; the right one's place follows from the row."""
    near = (2 * answer, answer + 10, answer // 2, answer + 1, answer + 2)
    wrong = list(dict.fromkeys(one for one in near if one != answer))[:3]
    place = index % 4
    return [str(one) for one in (*wrong[:place], answer, *wrong[place:])]
