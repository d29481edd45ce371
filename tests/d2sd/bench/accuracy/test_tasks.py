"""The documents of `d2sd eval`, its table and its verdict; one task through lm-eval where it is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from d2sd.bench.accuracy import run, tasks
from d2sd.bench.accuracy.harness import require_lm_eval, run_task
from d2sd.bench.accuracy.result import Accuracy, Metric, Outcome, count_different
from d2sd.bench.accuracy.scoring import Scorer
from d2sd.bench.provenance import provenance
from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.errors import D2SDError
from tests.d2sd.serve.conftest import build_tiny

DOCUMENTS = [
    {"question": "w5 w7", "answer": "w9", "choices": ["w3", "w9", "w4", "w8"], "label": 1},
    {"question": "w6", "answer": "w3", "choices": ["w3", "w9", "w4", "w8"], "label": 0},
]


def outcome(policy: str, differ: int | None, precision: str = "fp32") -> Outcome:
    return Outcome(
        bundle="a", precision=precision, policy=policy, task="gsm8k", differ=differ, differ_from_first=differ,
        metrics={"strict": Metric(value=0.25, stderr=0.1), "flexible": Metric(value=0.5, stderr=None)},
        answers=[[1, 2], [3]], truncated=0, seconds=2.0, tokens=3, accepted_length=1.5,
    )  # fmt: skip


def accuracy(*outcomes: Outcome) -> Accuracy:
    return Accuracy(
        provenance=provenance({}, "cpu"), limit=2, chat_template=False, max_new_tokens=8, outcomes=list(outcomes)
    )


def test_choices_are_four_with_the_answer_at_its_place() -> None:
    for answer in range(200):
        choices = tasks._choices(answer, answer)
        assert len(set(choices)) == 4
        assert choices[answer % 4] == str(answer)


def test_missing_data_names_the_command_that_fills_it(tmp_path: Path) -> None:
    with pytest.raises(D2SDError, match="d2sd data"):
        tasks.documents(tmp_path, ["gsm8k"])
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "gsm8k.jsonl").write_text('{"id": "a", "turns": ["b"]}\n')
    with pytest.raises(D2SDError, match="not the prompt set"):
        tasks.documents(tmp_path, ["gsm8k"])


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prompt set of two questions."""
    monkeypatch.setattr("d2sd.bench.accuracy.tasks.present", lambda data: {"eval/gsm8k.jsonl"})
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "gsm8k.jsonl").write_text('{"id": "a", "turns": ["q1"]}\n{"id": "b", "turns": ["q2"]}\n')
    return tmp_path


def test_answers_are_joined_by_question(data: Path) -> None:
    rows = [("q2", "so #### 1,000"), ("unused", "#### 5"), ("q1", "2 + 2 = 4\n#### -4\n")]
    text = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows)
    (data / "eval" / "gsm8k_test.jsonl").write_text(text)
    found = tasks.documents(data, ["gsm8k_choice"])
    assert [(one["question"], one["answer"]) for one in found] == [("q1", "-4"), ("q2", "1000")]
    assert all(one["choices"][one["label"]] == one["answer"] for one in found)


@pytest.mark.parametrize(
    "row", ["", '{"question": "q1", "answer": "#### x"}', '{"question": "q1", "answer": "#### 1"}']
)
def test_missing_answers_name_their_source(data: Path, row: str) -> None:
    if row:
        (data / "eval" / "gsm8k_test.jsonl").write_text(row + "\n")
    with pytest.raises(D2SDError, match="grade-school-math"):
        tasks.documents(data, ["gsm8k_perplexity", "gsm8k"])
    assert tasks.documents(data, ["gsm8k_perplexity"]) == [{"question": "q1"}, {"question": "q2"}]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2sd.extras.find_spec", lambda name: None)
    with pytest.raises(D2SDError, match=r"pip install 'lm-eval"):
        require_lm_eval()


def test_answers_differ_by_tokens_and_log_likelihoods_beyond_rounding() -> None:
    assert count_different([[1, 2], [3], -1.0, -2.0], [[1, 2], [4], -1.00001, -2.1]) == 2


def test_the_table_has_a_line_for_each_metric(tmp_path: Path) -> None:
    result = accuracy(outcome("off", None), outcome("auto", 0))
    lines = result.table().splitlines()
    assert lines[4] == "| gsm8k | strict | fp32 | auto | 0.250 ± 0.100 | 0 of 2 | 1.5 | 1.50 |"
    assert lines[5] == "| gsm8k | flexible | fp32 | auto | 0.500 | – | – | – |"
    result.save(tmp_path / "eval.json")
    assert Accuracy.model_validate_json((tmp_path / "eval.json").read_text()) == result
    result.check()


def test_a_changed_answer_fails_in_fp32_alone() -> None:
    accuracy(outcome("auto", 1, "fp8")).check()
    with pytest.raises(D2SDError, match="1 of 2"):
        accuracy(outcome("off", None), outcome("auto", 1)).check()


def test_every_task_runs_through_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    own = tasks.config("gsm8k_choice", tmp_path)
    monkeypatch.setattr("d2sd.bench.accuracy.harness.config", lambda task, folder: {
        "gsm8k": {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
                  "generation_kwargs": {"until": ["w2"]}, "metric_list": [{"metric": "exact_match"}]},
        "gsm8k_choice": own | {"doc_to_text": "{{question}}"},
        "gsm8k_perplexity": tasks.config(task, folder),
    }[task])  # fmt: skip
    monkeypatch.setattr("d2sd.bench.accuracy.harness.METRICS", {**tasks.METRICS, "gsm8k": {"exact_match,none": "m"}})
    bundle = load_bundle(build_tiny(tmp_path))
    for task in tasks.NAMES:
        scorer = Scorer(bundle, make_engine(bundle, policy="chain"), max_new_tokens=4)
        found = run_task(scorer, task, DOCUMENTS, None)
        assert set(found) == set(("m",) if task == "gsm8k" else tasks.METRICS[task].values())
        assert len(scorer.usage.answers) == (8 if task == "gsm8k_choice" else 2)


def test_every_bundle_is_looked_for_before_the_first_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "require_lm_eval", lambda: None)
    (tmp_path / "there").mkdir()
    there = build_tiny(tmp_path / "there")
    with pytest.raises(D2SDError, match="Not a bundle") as raised:
        run.Evaluation((there, tmp_path / "missing"), ["gsm8k"], tmp_path).run(tmp_path / "eval.json")
    assert str(raised.value.where) == str(tmp_path / "missing")
