"""A training within so many seconds, beside other work on a GPU: what `train_gpu.sh` starts.

    python -m benchmarks.gpu.training run RECIPE FOLDER --seconds 330   # leaves FOLDER/train.done, or train.failed
    python -m benchmarks.gpu.training pack FOLDER OUT                   # what there is, in parts of at most 16 MiB

Eight processes that share the GPU write the responses. One more, which has imported everything meanwhile, then trains:
its recipe's `seconds` are scaled to what is left, so that every schedule ends. A drafter that is stopped all the same
is written as it was last saved. Each stage is a line of FOLDER/train.log with the seconds since the start.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

PROCESSES = 8
#: Bytes of a part, below 16 MiB, and of all parts, below 64.
PART, ALL = 16_700_000, 66_500_000
#: Share of the seconds after which responses that are not written are given up.
_ANSWERS = 0.55
#: Seconds for all of a training but its steps: loading, features, what is matched, figures of heads, writing.
_AROUND = 45.0
#: Seconds at the end for packing, and seconds that an interrupted process gets.
_PACKING, _STOPPING = 8.0, 5.0
#: Imports what a training needs, and waits for its arguments.
_WAITING = """
import sys, torch
import d2sd.cli.train, d2sd.train.loop, d2sd.bundle.load, transformers
torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
print("ready", flush=True)
arguments = sys.stdin.readline().rstrip("\\n").split("\\t")
from d2sd.cli.main import main
main(arguments)
"""
_COMMAND = "from d2sd.cli.main import main; main()"


class Training:
    """One run in a folder."""

    def __init__(self, recipe: Path, folder: Path, seconds: float, processes: int) -> None:
        self.recipe, self.folder, self.processes = recipe, folder, processes
        self.work, self.out = folder / "work", folder / "out"
        self.begun = time.monotonic()
        self.until = self.begun + seconds - _PACKING
        folder.mkdir(parents=True, exist_ok=True)

    def say(self, line: str) -> None:
        with (self.folder / "train.log").open("a") as log:
            log.write(f"{time.monotonic() - self.begun:7.1f} s  {line}\n")

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def arguments(self, recipe: Path, only: str) -> list[str]:
        return ["train", str(recipe), "--work", str(self.work), "--out", str(self.out), "--only", only]

    def run(self) -> bool:
        """Whether every drafter's schedule ended."""
        self.say(f"began, for {self.left + _PACKING:.0f} s")
        trainer = self._start("drafters", ["-c", _WAITING], stdin=subprocess.PIPE)
        try:
            until = time.monotonic() + _ANSWERS * self.left
            answered = self._answers(self.processes, until)
            if not answered and not self._lines("answers") and time.monotonic() < until:
                self.say("answers: one process, after the failure of several")
                answered = self._answers(1, until)
            self.say(f"answers: {'all' if answered else 'not all'} written, {self._lines('answers')} lines")
            done = self._train(trainer)
        finally:
            _stop([trainer], 0)
        self.say("drafters: " + ("all trained" if done else "not all trained"))
        for role in unfinished(self.recipe, self.work, self.out):
            self.say(f"{role} drafter: written as last saved, before its schedule ended")
        return done

    def _answers(self, processes: int, until: float) -> bool:
        """Whether all are written in time."""
        together = {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": os.environ.get("MASTER_PORT", "29517"),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        arguments = ["-c", _COMMAND, *self.arguments(self.recipe, "answers")]
        writers = [
            self._start(f"answers-{rank}", arguments, together | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(processes)
        ]
        turns = 0
        while any(writer.poll() is None for writer in writers):
            if any(writer.poll() for writer in writers):
                self.say("answers: a process failed, whose log ends with: " + self._failure(writers))
                break
            if time.monotonic() > until:
                self.say("answers: stopped, as there is no more time")
                break
            if not turns and self._lines("answers"):
                turns = self._lines("turns")
                self.say(f"answers: the first are written, behind {turns} turns")
            time.sleep(0.2)
        whole = not any(writer.poll() is None or writer.poll() for writer in writers)
        _stop(writers, _STOPPING)
        return whole

    def _train(self, trainer: subprocess.Popen[str]) -> bool:
        recipe = self._fitted()
        assert trainer.stdin is not None
        trainer.stdin.write("\t".join(self.arguments(recipe, "drafters")) + "\n")
        trainer.stdin.close()
        seen: set[str] = set()
        while trainer.poll() is None and self.left > 0:
            for name in ("first.jsonl", "out/first", "second.jsonl", "out/second", "first-head", "second-head"):
                base = self.folder if name.startswith("out") else self.work
                if name not in seen and (base / name).exists():
                    seen.add(name)
                    self.say(f"drafters: {name}")
            time.sleep(0.2)
        if trainer.poll() is None:
            self.say("drafters: stopped, as there is no more time")
        elif trainer.poll():
            self.say("drafters: failed, the log ends with: " + self._failure([trainer]))
        done = trainer.poll() == 0
        _stop([trainer], _STOPPING)
        return done

    def _fitted(self) -> Path:
        """A copy of the recipe, beside it, whose trainings end in the seconds that are left."""
        values: dict[str, Any] = yaml.safe_load(self.recipe.read_text("utf-8"))
        heads = [values["head"]] * sum(role in values for role in ("first", "second")) if "head" in values else []
        parts = [values[role] for role in ("first", "second") if role in values] + heads
        planned = sum(part["seconds"] for part in parts)
        scale = max(0.05, (self.left - _AROUND) / planned)
        for part in {id(part): part for part in parts}.values():
            part["seconds"] = round(part["seconds"] * scale, 1)
        path = self.recipe.with_name(f"{self.recipe.stem}-fitted.yaml")
        path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), "utf-8")
        shutil.copy(path, self.folder / "recipe.yaml")
        told = ", ".join(f"{name} {values[name]['seconds']}" for name in ("first", "second", "head") if name in values)
        self.say(f"drafters: seconds {told}")
        return path

    def _start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        log = (self.folder / f"{name}.log").open("a")
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (environment or {}),
        )

    def _lines(self, kind: str) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.work.glob(f"{kind}*.jsonl"))

    def _failure(self, processes: Sequence[subprocess.Popen[str]]) -> str:
        logs = [self.folder / "drafters.log"]
        if len(processes) > 1:
            logs = [self.folder / f"answers-{i}.log" for i, each in enumerate(processes) if each.poll()]
        lines = logs[0].read_text("utf-8", "replace").strip().splitlines()
        return " | ".join(lines[-3:])


def _stop(processes: Sequence[subprocess.Popen[str]], seconds: float) -> None:
    """Interrupt those that run, and kill them after so many seconds."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    until = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def unfinished(recipe: Path, work: Path, out: Path) -> list[str]:
    """Write drafters that have a saved state alone; returns their names."""
    missing = [name for name in ("first", "second") if not (out / name / "model.safetensors").exists()]
    missing = [name for name in missing if (work / name / "state.safetensors").exists()]
    if not missing:
        return []
    from safetensors import safe_open

    from d2sd.bundle.load import load_bundle
    from d2sd.modeling.drafters.dflash import Drafter
    from d2sd.policies import DrafterRole
    from d2sd.progress import silent
    from d2sd.train.data.features import TrainingData
    from d2sd.train.dflash import drafter_config, second_drafter
    from d2sd.train.dist import Dist
    from d2sd.train.pipeline.run import Run
    from d2sd.train_recipe import Geometry, load_train_recipe

    loaded = load_train_recipe(recipe)
    run = Run(loaded, work, out, Dist(), silent, click.echo)
    bundle = load_bundle(work / "target", verify=False)
    assert isinstance(loaded.shape, Geometry)
    first = Drafter(drafter_config(loaded.shape, bundle.target.config))
    answers = run._responses(bundle).written()
    _, data = TrainingData(answers, 1, lambda _: None).split(loaded.data.held_out)  # type: ignore[arg-type, return-value]
    if loaded.head is not None and loaded.head.unseen is not None:
        _, data = data.split(loaded.head.unseen)
    for name in missing:
        drafter = first if name == "first" or loaded.second is None else second_drafter(first, loaded.second)
        with safe_open(work / name / "state.safetensors", "pt") as state:
            drafter.load_state_dict({key: state.get_tensor(f"drafter.{key}") for key, _ in drafter.named_parameters()})
        run._write(next(role for role in DrafterRole if role.key == name), drafter, run._vocabulary(data, bundle))
    return missing


def pack(folder: Path, out: Path) -> list[Path]:
    """Drafters, logs and answers of a training as parts of one tar; answers are left out where there is no room."""
    out.mkdir(parents=True, exist_ok=True)
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for path in sorted((folder / "out").glob("*")):
            tar.add(path, f"out/{path.name}")
        logs = io.BytesIO()
        with tarfile.open(fileobj=logs, mode="w:gz", compresslevel=6) as inner:
            for path in sorted({*folder.glob("*.log"), *folder.glob("*.yaml"), *folder.glob("train.*")}):
                inner.add(path, path.name)
            for name in ("first.jsonl", "second.jsonl", "pace.jsonl", "asked.json"):
                if (folder / "work" / name).exists():
                    inner.add(folder / "work" / name, name)
        _add(tar, "logs.tgz", logs)
        answers = io.BytesIO()
        with gzip.GzipFile(fileobj=answers, mode="wb", compresslevel=6, mtime=0) as file:
            for path in sorted((folder / "work").glob("answers*.jsonl")):
                file.write(path.read_bytes())
        if whole.tell() + answers.tell() < ALL:
            _add(tar, "answers.jsonl.gz", answers)
    data, parts = whole.getvalue(), []
    for number, start in enumerate(range(0, len(data), PART)):
        parts.append(out / f"training.tar.{number:02}")
        parts[-1].write_bytes(data[start : start + PART])
    return parts


def _add(tar: tarfile.TarFile, name: str, content: io.BytesIO) -> None:
    info = tarfile.TarInfo(name)
    info.size = content.tell()
    content.seek(0)
    tar.addfile(info, content)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("recipe", type=Path)
    running.add_argument("folder", type=Path)
    running.add_argument("--seconds", type=float, default=330.0)
    running.add_argument("--processes", type=int, default=PROCESSES)
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("out", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.command == "pack":
        for part in pack(chosen.folder, chosen.out):
            print(f"{part}: {part.stat().st_size:,} bytes")
        return
    # a shell's background job ignores it, and so would what is started here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    training = Training(chosen.recipe, chosen.folder, chosen.seconds, chosen.processes)
    done, error = False, ""
    try:
        done = training.run()
    except Exception as failure:  # what there is, is packed
        error = repr(failure)
        training.say(f"failed: {error}")
    pack(chosen.folder, chosen.folder / "packed.partial")
    shutil.rmtree(chosen.folder / "packed", ignore_errors=True)
    (chosen.folder / "packed.partial").rename(chosen.folder / "packed")
    training.say("packed")
    (chosen.folder / ("train.done" if done else "train.failed")).write_text(error)


if __name__ == "__main__":
    main(sys.argv[1:])
