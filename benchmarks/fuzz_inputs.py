"""Damaged inputs by the thousand: every recipe, checkpoint and bundle ends in a result or a message, never a traceback.

    python -m benchmarks.fuzz_inputs recipes recipes/smollm2-135m.yaml --count 20000
    python -m benchmarks.fuzz_inputs checkpoints PROJECT/recipe.yaml --count 3000
    python -m benchmarks.fuzz_inputs obstacles PROJECT/recipe.yaml --count 3000
    python -m benchmarks.fuzz_inputs outputs PROJECT/recipe.yaml --count 3000
    python -m benchmarks.fuzz_inputs training TRAINING/train.yaml --count 3000
    python -m benchmarks.fuzz_inputs bundles BUNDLE --count 3000
    python -m benchmarks.fuzz_inputs templates BUNDLE --count 3000

    training                a damaged training recipe, or a file that it names, through `train`, mostly with `--plan`
    recipes, checkpoints    a damaged recipe, or a file of its folder, through `d2sd build --plan`
    obstacles               a pipe, a device, a link or the like in place of such a file, through `build` and `convert`
    outputs                 files, links and marks where `build` and `convert` write: nobody's file may change
    bundles, templates      a damaged bundle, or one with a hostile chat template, through `inspect` and `generate`

A fault is an internal error, an uncaught exception, a hang of more than 20 seconds, memory that ran out, a changed file
of somebody else's or an incomplete output. Exit code 1 if there was one. PROJECT (a recipe whose paths lie in its own
folder) and BUNDLE had better be tiny: each is copied once, and one file of it is damaged at a time. `--tiny FOLDER`
writes both: `python -m benchmarks.fuzz_inputs all build/fuzz --tiny --count 20000` does everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click
import torch
from click.testing import CliRunner

from d2sd.cli.main import main
from d2sd.io import MARKER, claim, remove
from tools.hostile.damage import FRAGMENTS, VALUES, damaged
from tools.hostile.places import OBSTACLES, PLACES, WORK, contents, put

HANG = 20  # seconds


class Hang(BaseException):
    """A command did not end in time."""


@contextmanager
def alarm() -> Iterator[None]:
    """Raise `Hang` after a time."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.alarm(0)


def fault_of(*arguments: str) -> str | None:
    """Run a command in this process; return the fault, if it raised anything but a user error."""
    try:
        with alarm():
            result = CliRunner(env={"D2SD_DEBUG": "1"}).invoke(main, arguments)
    except Hang as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "ring"]
        ours = [frame for frame in frames if "site-packages" not in frame.filename]
        return f"hang: {ours[-1].filename}:{ours[-1].lineno} {ours[-1].line}"
    raised = result.exception
    if raised is not None and not isinstance(raised, SystemExit):
        text = "".join(traceback.format_exception(raised))
    elif result.exit_code not in (0, 1, 2) or "Out of memory" in result.stderr:
        text = result.stderr
    else:
        return None
    places = [line.strip() for line in text.splitlines() if line.startswith("  File") and "site-packages" not in line]
    messages = re.findall(r"^\w*(?:Error|Exception).*", text, re.MULTILINE) or [text[-99:]]
    return f"{messages[-1][:99]} {places[-1] if places else ''}"


def recipes(path: Path, draw: random.Random) -> Iterator[str | None]:
    """Damage the text of a recipe, or override one of its values."""
    text = path.read_bytes()
    keys = ("name", "tree.row_budget", "limits.max_batch", "limits", "target", "sampling.seed", "a.b.c", "output")
    file = path.with_name(f"fuzz-{os.getpid()}.yaml")  # its relative paths start here
    try:
        while True:
            if draw.random() < 0.2:
                override = f"{draw.choice(keys)}={draw.choice(VALUES)}"
                yield fault_of("build", str(path), "--plan", "--set", override)
            else:
                file.write_bytes(damaged(text, draw))
                yield fault_of("build", str(file), "--plan")
    finally:
        file.unlink(missing_ok=True)


def checkpoints(path: Path, draw: random.Random) -> Iterator[str | None]:
    """Damage a file of a recipe's folder, except the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(path.parent, Path(folder) / "project"))
        files = [file for file in sorted(copy.rglob("*")) if file.is_file() and file.name != path.name]
        while True:
            with one_damaged(draw.choice(files), draw):
                yield fault_of("build", str(copy / path.name), "--plan")


def training(path: Path, draw: random.Random) -> Iterator[str | None]:
    """Damage a training recipe or a file that it names, and plan; every tenth time train."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(path.parent, Path(folder) / "project"))
        recipe = copy / path.name
        files = [file for file in sorted(copy.rglob("*")) if file.is_file() and file.name != "tokenizer.json"]
        command = ("train", str(recipe), "--work", f"{folder}/work", "--out", f"{folder}/out")
        while True:
            with one_damaged(recipe if draw.random() < 0.5 else draw.choice(files), draw):
                yield fault_of(*command, *(() if draw.random() < 0.1 else ("--plan",)))
            remove(Path(folder) / "work")
            remove(Path(folder) / "out")


def bundles(path: Path, draw: random.Random) -> Iterator[str | None]:
    """Damage a file of a bundle: the manifest, or another one together with its hash in the manifest."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(path, Path(folder) / "bundle"))
        manifest = copy / "manifest.json"
        sound = manifest.read_bytes()
        # not tokenizer.json: the tokenizers library prints every id that a damaged vocabulary leaves out, up to 2^24
        files = [file for file in sorted(copy.rglob("*")) if file.is_file() and file.name != "tokenizer.json"]
        while True:
            file = manifest if draw.random() < 0.5 else draw.choice(files)
            with one_damaged(file, draw):
                if file != manifest:
                    rehash(copy, file)
                fault = fault_of("inspect", str(copy))
                if file != manifest:
                    fault = fault or fault_of("generate", str(copy), "-p", "w1", "--max-new-tokens", "2")
                manifest.write_bytes(sound)
                yield fault


def rehash(bundle: Path, file: Path) -> None:
    """Write the hash of a changed file into the manifest."""
    manifest = bundle / "manifest.json"
    values = json.loads(manifest.read_bytes())
    values["files"][file.relative_to(bundle).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(values))


def templates(path: Path, draw: random.Random) -> Iterator[str | None]:
    """Give a bundle a chat template of random fragments; every tenth time the bundle's own must work after it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(path, Path(folder) / "bundle"))
        file, manifest = copy / "target" / "tokenizer_config.json", copy / "manifest.json"
        (copy / "target" / "chat_template.jinja").unlink(missing_ok=True)
        kept, own = manifest.read_bytes(), json.loads(file.read_bytes())
        values = json.loads(kept)
        values["files"].pop("target/chat_template.jinja", None)
        while True:
            parts = draw.choices(FRAGMENTS, k=draw.choice((1, 1, 2, 3, 5)))
            text = "".join(part.replace("N", str(draw.choice((0, 2, 7, 9, 10, 99)))) for part in parts)
            file.write_text(json.dumps(own | {"chat_template": text}))
            manifest.write_text(json.dumps(values))
            rehash(copy, file)
            fault = fault_of("generate", str(copy), "-p", "w1", "--max-new-tokens", "2")
            if draw.random() < 0.1:
                honest = CliRunner().invoke(main, ["generate", str(path), "-p", "w1", "--max-new-tokens", "2"])
                fault = fault or (None if honest.exit_code == 0 else f"an honest template fails: {honest.stderr[:99]}")
            yield fault and f"{fault} {text[:60]}"


def obstacles(path: Path, draw: random.Random) -> Iterator[str | None]:
    """Put an obstacle in place of a file of a recipe's folder."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(path.parent, Path(folder) / "project"))
        victim = Path(folder) / "victim"
        put(victim / "file", "text", victim)
        files = [file for file in sorted(copy.rglob("*")) if file.is_file()]
        commands = [
            ("build", str(copy / path.name), "--plan"),
            ("build", str(copy / path.name), "--out", f"{folder}/out"),
        ]
        commands += [
            ("convert", str(copy / name), "--to", "z-lab", "-o", f"{folder}/out") for name in ("first", "second")
        ]
        commands += [
            (
                "convert",
                str(copy / "first"),
                "--to",
                "speculators",
                "--target",
                str(copy / "target"),
                "-o",
                f"{folder}/out",
            )
        ]
        while True:
            file = draw.choice(files)
            sound = file.rename(Path(folder) / "sound")
            put(file, draw.choice(OBSTACLES), victim)
            yield fault_of(*draw.choice(commands))
            for left in (file, Path(folder) / "out", Path(folder) / ".out.building", Path(folder) / ".out.partial"):
                remove(left)
            sound.rename(file)


def outputs(path: Path, draw: random.Random) -> Iterator[str | None]:
    """Put obstacles where a command writes, with and without its mark; look at everything afterwards."""
    while True:
        with tempfile.TemporaryDirectory() as folder:
            home, victim, command = Path(folder) / "home", Path(folder) / "victim", draw.choice(list(WORK))
            put(victim / "file", "text", victim)
            put(victim / "target" / "config.json", "text", victim)
            home.mkdir()
            marked = draw.random() < 0.5
            if marked:
                claim(home / WORK[command], command)
            for _ in range(draw.choice((1, 1, 2))):
                place = home / draw.choice(PLACES).replace("W", WORK[command])
                with suppress(OSError):  # the other one is in the way
                    put(place, draw.choice(OBSTACLES), victim)
            # a mark alone is of a run that wrote nothing, and is taken over
            for mark in [
                file for file in home.rglob(MARKER) if file.is_file() and len(list(file.parent.iterdir())) == 1
            ]:
                if b'"d2sd"' in mark.read_bytes():
                    mark.unlink()
            before = contents(victim) | {
                k: v for k, v in contents(home).items() if not marked or WORK[command] not in k
            }
            out, rest = home / "out", (["--plan"] if draw.random() < 0.05 else [])
            asked = {
                "build": ["build", str(path), "--out", str(out), *rest],
                "convert": ["convert", str(path.parent / "first"), "--to", "z-lab", "-o", str(out)],
            }[command]
            fault = fault_of(*asked)
            after = contents(victim) | contents(home)
            if changed := sorted(name for name, data in before.items() if after.get(name) != data):
                fault = fault or f"{command} changed {changed[0].removeprefix(folder)}"
            if command == "build" and (out / "manifest.json").is_file():
                fault = fault or fault_of("inspect", str(out))
            yield fault


@contextmanager
def one_damaged(file: Path, draw: random.Random) -> Iterator[None]:
    """Damage a file (the beginning of a large one), and restore it."""
    sound = file.read_bytes()
    file.write_bytes(damaged(sound[:20_000], draw) + sound[20_000:])
    try:
        yield
    finally:
        file.write_bytes(sound)


KINDS = {kind.__name__: kind for kind in (recipes, checkpoints, training, obstacles, outputs, bundles, templates)}


def tiny(folder: Path) -> dict[str, Path]:
    """Write a tiny project with pair heads and a calibration, its bundle and a training; return every kind's input."""
    from tests.convert.helpers import add_calibration, write_project
    from tests.d2sd.cli.train.helpers import add_documents_and_heads, write_training
    from tests.tiny import HEADS

    recipe = folder / "project" / "recipe.yaml"
    if not recipe.exists():
        write_project(recipe.parent, head=HEADS["pair"])
        add_calibration(recipe)
        settings = recipe.parent / "target" / "tokenizer_config.json"
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    bundle = folder / "bundle"
    if not bundle.exists():
        made = CliRunner().invoke(main, ["build", str(recipe), "--out", str(bundle)])
        assert made.exit_code == 0, made.output
    learnt = folder / "training" / "train.yaml"
    if not learnt.exists():
        write_training(learnt.parent)
        add_documents_and_heads(learnt.parent)
    return dict.fromkeys(KINDS, recipe) | {"training": learnt, "bundles": bundle, "templates": bundle}


@click.command()
@click.argument("kind", type=click.Choice([*KINDS, "all"]))
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--tiny", "is_tiny", is_flag=True, help="Write a tiny project and bundle into the folder PATH, and take these."
)
@click.option("--count", default=1000, show_default=True, help="Inputs, together.")
@click.option("--seconds", default=3600.0, show_default=True, help="At most, of each kind.")
@click.option("--seed", default=0, show_default=True)
def fuzz(kind: str, path: Path, is_tiny: bool, count: int, seconds: float, seed: int) -> None:
    """Damage the input at PATH in COUNT ways, for at most SECONDS, and print the faults."""
    if kind == "all" and not is_tiny:
        raise click.UsageError("all kinds need --tiny")
    inputs = tiny(path) if is_tiny else {kind: path}
    CliRunner().invoke(main, ["build", "none.yaml"])  # imports take longer than a hang
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine look like a hang
    kinds = list(KINDS) if kind == "all" else [kind]
    found = sum([run(one, inputs[one], count // len(kinds), seconds, seed) for one in kinds])
    raise SystemExit(bool(found))


def run(kind: str, path: Path, count: int, seconds: float, seed: int) -> int:
    """Try inputs of one kind; print and count the faults."""
    faults: Counter[str] = Counter()
    cases, tried = KINDS[kind](path, random.Random(seed)), 0
    end = time.monotonic() + seconds
    while tried < count and time.monotonic() < end:
        tried += 1
        if fault := next(cases):
            faults[fault] += 1
    cases.close()  # type: ignore[attr-defined]
    for fault, times in faults.most_common():
        click.echo(f"{times:6} {fault}")
    click.echo(f"{kind}: {tried} inputs, {faults.total()} faults in {len(faults)} places")
    return faults.total()


if __name__ == "__main__":
    fuzz()
