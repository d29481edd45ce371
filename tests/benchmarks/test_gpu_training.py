"""A training within seconds: what its stages are told, what is left of a stopped one, and what is carried back."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.gpu import training
from benchmarks.gpu.training import Training, pack, unfinished
from d2sd.convert.kinds import DFLASH
from tests.d2sd.cli.train.helpers import SETTINGS, edit, write_training

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "train" / "smollm2-135m-gpu.yaml"


def test_seconds_are_scaled_to_what_is_left(tmp_path: Path) -> None:
    """Those of the drafters, and those of a head for each."""
    recipe = tmp_path / "pair.yaml"
    shutil.copy(RECIPE, recipe)
    before = yaml.safe_load(recipe.read_text())
    made = Training(recipe, tmp_path / "run", 200, 2)
    after = yaml.safe_load(made._fitted().read_text())
    total = after["first"]["seconds"] + after["second"]["seconds"] + 2 * after["head"]["seconds"]
    assert total == pytest.approx(200 - training._PACKING - training._AROUND, abs=1)
    assert after["first"]["seconds"] / after["second"]["seconds"] == pytest.approx(
        before["first"]["seconds"] / before["second"]["seconds"], rel=0.02
    )
    for part in ("first", "second", "head"):
        before[part]["seconds"] = after[part]["seconds"]
    assert after == before
    assert (tmp_path / "run" / "recipe.yaml").exists()


def test_writers_that_wait_for_a_failed_one_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Training(RECIPE, tmp_path, 1000, 2)
    script = "import os, sys, time; print('why'); sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
    monkeypatch.setattr(training, "_COMMAND", script)
    begun = time.monotonic()
    assert not made._answers(2, begun + 600)
    assert time.monotonic() - begun < 60
    assert "a process failed, whose log ends with: why" in (tmp_path / "train.log").read_text()


def test_a_trainer_is_stopped_in_time(tmp_path: Path) -> None:
    recipe = tmp_path / "pair.yaml"
    shutil.copy(RECIPE, recipe)
    made = Training(recipe, tmp_path / "run", training._PACKING + 2, 1)
    waiting = [
        sys.executable,
        "-c",
        "import sys, time; print(sys.stdin.readline()); sys.stdout.flush(); time.sleep(600)",
    ]
    trainer = subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert not made._train(trainer)
    assert trainer.returncode not in (0, None)
    assert trainer.stdout is not None
    assert "pair-fitted.yaml\t--work" in trainer.stdout.read()
    assert "stopped, as there is no more time" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.slow
def test_a_stopped_drafter_is_written_as_it_was_saved(tmp_path: Path) -> None:
    """The first was finished; of the second there is a state of two steps. Both are left, and both draft the same."""
    project = write_training(tmp_path / "project")
    edit(project, "second", SETTINGS | {"rejections": "matched"})
    edit(project, "drafter.draft_vocab_size", 12)
    command = [sys.executable, "-c", "from d2sd.cli.main import main; main()", "train", f"{project}/train.yaml"]
    command += ["--work", f"{project}/work", "--out", f"{project}/out", "--only"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for only in ("answers", "drafters"):
        subprocess.run([*command, only], check=True, env=environment, capture_output=True)
    assert unfinished(project / "train.yaml", project / "work", project / "out") == []
    expected = DFLASH.load(project / "out" / "second", torch.float32)
    shutil.rmtree(project / "out" / "second")
    assert unfinished(project / "train.yaml", project / "work", project / "out") == ["second"]
    found = DFLASH.load(project / "out" / "second", torch.float32)
    assert found.config == expected.config
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]), name


def test_what_there_is_is_carried_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts that are joined to one archive; without answers where they do not fit."""
    monkeypatch.setattr(training, "PART", 30_000)
    monkeypatch.setattr(training, "ALL", 130_000)
    folder = tmp_path / "run"
    (folder / "out" / "first").mkdir(parents=True)
    (folder / "work").mkdir()
    weights = os.urandom(70_000)
    (folder / "out" / "first" / "model.safetensors").write_bytes(weights)
    (folder / "train.log").write_text("told\n")
    (folder / "work" / "answers.jsonl").write_text("one\n")
    (folder / "work" / "answers-1.jsonl").write_text("two\n")
    parts = pack(folder, tmp_path / "parts")
    assert len(parts) == 3
    assert all(part.stat().st_size <= 30_000 for part in parts)
    done = subprocess.run(
        ["sh", str(ROOT / "benchmarks" / "train_gpu.sh"), "join", str(tmp_path / "parts"), str(tmp_path / "joined")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    joined = tmp_path / "joined"
    assert (joined / "out" / "first" / "model.safetensors").read_bytes() == weights
    assert sorted(gzip.decompress((joined / "answers.jsonl.gz").read_bytes()).splitlines()) == [b"one", b"two"]
    with tarfile.open(joined / "logs.tgz") as logs:
        assert "train.log" in logs.getnames()
    (folder / "work" / "answers.jsonl").write_bytes(os.urandom(90_000))
    archive = b"".join(part.read_bytes() for part in pack(folder, tmp_path / "more"))
    assert b"answers.jsonl.gz" not in archive


def test_unknown_words_print_the_usage() -> None:
    done = subprocess.run(
        ["sh", str(ROOT / "benchmarks" / "train_gpu.sh"), "begin"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sh benchmarks/train_gpu.sh start SECONDS")
