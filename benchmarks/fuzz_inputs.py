"""Damaged inputs by the thousand: every recipe, checkpoint and bundle ends in a result or a message, never a traceback.

    python benchmarks/fuzz_inputs.py recipes recipes/smollm2-135m.yaml --count 20000
    python benchmarks/fuzz_inputs.py checkpoints PROJECT/recipe.yaml --count 3000
    python benchmarks/fuzz_inputs.py bundles BUNDLE --count 3000

Recipes and checkpoints (of a recipe whose paths lie in its own folder) go through `d2sd build --plan`; bundles through
`d2sd inspect`, and through `d2sd generate` with hashes made to match. A fault is an internal error, an uncaught
exception, a hang of more than 20 seconds or memory that ran out. Exit code 1 if there was one. PROJECT and BUNDLE had
better be tiny: each is copied once, and one file of it is damaged at a time.
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
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click
from click.testing import CliRunner

from d2sd.cli.main import main

HANG = 20  # seconds
#: What is written in place of a value: valid in JSON, in YAML, or in neither.
VALUES = (
    *("0", "-1", "1", "2", "3.5", "1e400", "-0.0", "true", "null", "[]", "{}", '""', "[[]]", '{"a": 1}', "a", '"a"'),
    *("off", "~", "0b_", "0x_", "1_0", "12:30", "2001-99-99", "2001-01-01", ".inf", "-.inf", ".nan", "NaN", "Infinity"),
    *("!!int a", "!!timestamp a", "!!bool a", "!!float a", "!!binary a", "!!set {a}", "!!python/name:os.system", "<<"),
    *(str(2**31), str(2**63), str(2**64), str(10**30), "9" * 4400, "0x" + "f" * 5000, "1" * 400 + ".5"),
    *(r'"\U00110000"', r'"\ud800"', r'"\0"', r'"a\u0000b"', '"' + "x" * 100_000 + '"', "../" * 40, "/dev/zero"),
    *("[" * 1000, "[" * 1000 + "]" * 1000, "{a: " * 300, '{"a":' * 5000, "&a [*a]", "*a", "&a a", "? [a]", "- a"),
    "[&0 [x]" + "".join(f", &{i + 1} [{', '.join([f'*{i}'] * 9)}]" for i in range(9)) + "]",  # an alias bomb
    *("\x00", "\x1b[2J", "\xa0", "é", "\u2028", "\x85", "\t", ":", "#", "%", "@", "`", "|", ">", "\n", "\n\n- a\n"),
)
#: A value of JSON or of flow YAML.
_VALUE = re.compile(rb'(?<=[:,\[{ ])\s*("(?:[^"\\]|\\.)*"|[-+\w./]+)(?=[,\]}\s])')


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return `data` with one to three faults: values replaced, or bytes changed, removed, inserted or doubled."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kind = draw.randrange(10)
        found = list(_VALUE.finditer(data)) if kind < 6 else []
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 1, 2, 8, 40, 400)))
        if found:
            value = draw.choice(found)
            new = draw.choice(VALUES).encode() if kind < 5 else draw.choice(found).group(1)
            data = data[: value.start(1)] + new + data[value.end(1) :]
        elif kind == 6:
            data = data[:at]
        elif kind == 7:
            data = data[:at] + data[end:]
        elif kind == 8:
            data = data[:end] + data[at:]
        else:
            data = data[:at] + draw.choice((draw.randbytes(1), b"\xff", b"\x00", b"{", b"]", b"\n", b" ")) + data[end:]
    return data


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
    except Hang:
        return f"hang: {traceback.format_exc().splitlines()[-3].strip()}"
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        text = "".join(traceback.format_exception(error))
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


def bundles(path: Path, draw: random.Random) -> Iterator[str | None]:
    """Damage a file of a bundle: the manifest, or another one together with its hash in the manifest."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(path, Path(folder) / "bundle"))
        manifest = copy / "manifest.json"
        sound = manifest.read_bytes()
        # not tokenizer*.json: the tokenizers library prints every id that a damaged vocabulary leaves out, up to 2^32
        files = [file for file in sorted(copy.rglob("*")) if file.is_file() and not file.name.startswith("tokenizer")]
        while True:
            file = manifest if draw.random() < 0.5 else draw.choice(files)
            with one_damaged(file, draw):
                if file != manifest:
                    values = json.loads(sound)
                    values["files"][file.relative_to(copy).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
                    manifest.write_text(json.dumps(values))
                fault = fault_of("inspect", str(copy))
                if file != manifest:
                    fault = fault or fault_of("generate", str(copy), "-p", "w1", "--max-new-tokens", "2")
                manifest.write_bytes(sound)
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


KINDS = {"recipes": recipes, "checkpoints": checkpoints, "bundles": bundles}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--count", default=1000, show_default=True)
@click.option("--seconds", default=3600.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
def fuzz(kind: str, path: Path, count: int, seconds: float, seed: int) -> None:
    """Damage the input at PATH in COUNT ways, for at most SECONDS, and print the faults."""
    faults: Counter[str] = Counter()
    cases, tried = KINDS[kind](path, random.Random(seed)), 0
    CliRunner().invoke(main, ["build", "none.yaml"])  # imports take longer than a hang
    end = time.monotonic() + seconds
    while tried < count and time.monotonic() < end:
        tried += 1
        if fault := next(cases):
            faults[fault] += 1
    cases.close()  # type: ignore[attr-defined]
    for fault, times in faults.most_common():
        click.echo(f"{times:6} {fault}")
    click.echo(f"{kind}: {tried} inputs, {faults.total()} faults in {len(faults)} places")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    fuzz()
