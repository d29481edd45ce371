"""`d2sd train` interrupted, killed or run again ends in the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from d2sd.train.loop import Trainer
from tests.convert.helpers import tree_bytes
from tests.d2sd.cli.train.helpers import LOGGED, logged, nth_time, refusal, rows, script, train, trained, undo


def test_a_second_run_asks_trains_and_measures_nothing_and_writes_the_same_bytes(
    finished: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = (finished / "work" / "answers.jsonl").read_bytes()

    def refuse(*args: object, **kwargs: object) -> Any:
        raise AssertionError("it was done before")

    monkeypatch.setattr(Trainer, "_update", refuse)
    monkeypatch.setattr("d2sd.runtime.engine.Engine.submit", refuse)
    monkeypatch.setattr("d2sd.train.pipeline.models.build", refuse)
    assert trained(finished) == expected
    assert (finished / "work" / "answers.jsonl").read_bytes() == answers


#: What is undone first, the call that is interrupted, and at which time.
POINTS = {
    "writing a turn": (["turns", "answers"], "d2sd.train.pipeline.responses.append_row", 3),
    "answering": (["answers"], "d2sd.runtime.engine.Engine.step", 5),
    "writing an answer": (["answers"], "d2sd.train.pipeline.responses.append_response", 7),
    "behind the features": (["features"], "d2sd.train.pipeline.run.Evaluator", 1),
    "training the first": (["first"], "d2sd.train.loop.Trainer._update", 4),
    "evaluating the first": (["first"], "d2sd.train.pipeline.evaluate.run_observed", 1),
    "evaluating the first in the end": (["first"], "d2sd.train.pipeline.evaluate.run_observed", 2),
    "evaluating the second in the end": (["second"], "d2sd.train.pipeline.evaluate.run_observed", 3),
    "saving the second": (["second"], "d2sd.train.state.save_file", 1),
    "writing the second": (["second"], "d2sd.convert.checkpoint.weights.write_tensors", 2),
    "evaluating the pair": (["evaluation"], "d2sd.train.pipeline.evaluate.run_observed", 2),
    "calibrating": (["calibration"], "d2sd.runtime.observe.observe", 9),
}
#: One of each kind of work; the others interrupt the same work elsewhere.
FAST = {"answering", "training the first", "saving the second", "evaluating the pair"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("undone", "name", "number"),
    [pytest.param(*point, id=at, marks=[] if at in FAST else pytest.mark.slow) for at, point in POINTS.items()],
)
def test_interrupted_anywhere_it_ends_in_the_same_bytes(
    finished: Path,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    undone: list[str],
    name: str,
    number: int,
) -> None:
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


@pytest.mark.slow
@pytest.mark.subprocess
def test_killed_by_the_kernel_in_the_middle_of_training_it_resumes(finished: Path, expected: dict[str, bytes]) -> None:
    undo(finished, "first")
    killed = subprocess.run(
        [
            sys.executable,
            script(
                finished,
                """
calls = []
def update(self):
    calls.append(None)
    if len(calls) == 4:  # the last step
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self)
real, Trainer._update = Trainer._update, update
""",
            ),
        ],
        check=False,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (finished / "work" / "first" / "state.safetensors").is_file()
    with (finished / "work" / "first.jsonl").open("a") as log:
        log.write('{"step": 4, "lo')  # a line that a kill has cut
    assert trained(finished) == expected
    assert logged(finished, "first") == LOGGED


def test_a_cut_answer_is_asked_again(finished: Path, expected: dict[str, bytes]) -> None:
    path = finished / "work" / "answers.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    undo(finished, "first")
    assert trained(finished) == expected
    assert path.read_bytes() == whole


@pytest.mark.slow
def test_response_order_is_the_recipes_not_the_files(finished: Path, expected: dict[str, bytes]) -> None:
    """Short answers finish early, and the first ones are held out; an interruption changes what finishes when."""
    path = finished / "work" / "answers.jsonl"
    path.write_text("".join(line + "\n" for line in reversed(path.read_text().splitlines())))
    undo(finished, "first")
    undo(finished, "second")
    assert trained(finished) == expected


def test_a_full_disk_is_a_message(finished: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    shutil.rmtree(finished / "out")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert "disk filled up during the features" in refusal(finished)
    assert trained(finished) == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.subprocess
def test_two_processes_train_a_pair(project: Path, whole: Path) -> None:
    """Through torchrun: each answers its share, both train on theirs, one writes."""
    (project / "work").mkdir()
    shutil.copytree(whole / "work" / "target", project / "work" / "target")
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script(project)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert tree_bytes(project / "out").keys() == tree_bytes(whole / "out").keys() - {"curves.png"}
    assert ended.stdout.count("tokens a step on 2 held-out prompts") == 3, "one process tells"
    for kind in ("turns", "answers"):
        shares = [{line["id"] for line in rows(project, f"{kind}{rank}.jsonl")} for rank in ("", "-1")]
        assert min(map(len, shares)) >= 3
        assert not shares[0] & shares[1]
    for name in ("first", "second"):
        ours, alone = ([row for row in rows(folder, f"{name}.jsonl") if "loss" in row] for folder in (project, whole))
        assert [row["step"] for row in ours] == [1, 2, 3, 4]
        assert ours[0]["loss"] == pytest.approx(alone[0]["loss"], rel=0.01), "the same sequences"
