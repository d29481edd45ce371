"""The README's own commands, in a new environment that is no editable install, inside the clone and outside it.

`make readme` runs them: in a short form, and as they are written with every CPython it finds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.load.dynamo import free_port
from tests.conftest import Once

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")
BUNDLE = Path("bundles/smollm2-135m")
#: What makes a command short, by its beginning.
SHORT = {
    "d2sd-build": "--plan",
    "d2sd generate": "--max-new-tokens 8",
    "d2sd bench": "--methods chain --rows 8 --per-set 1 --max-new-tokens 4",
    "d2sd serve": "--policy chain --max-batch 1",
}
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.S | re.M)


def commands(block: str) -> list[str]:
    """The commands of a block, continued lines joined, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def holding(text: str) -> list[str]:
    """The commands of the only block in which `text` occurs."""
    (block,) = [block for block in blocks("sh") if text in block]
    return commands(block)


class Place(NamedTuple):
    """An environment and a copy of the working tree, as `git clone` makes one."""

    env: Path
    clone: Path

    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "D2SD_SMOLLM2_BUNDLE"}}
        path = f"{self.env / 'bin'}{os.pathsep}{kept['PATH']}"
        # pip asks every index for every package: one that cannot be reached must not cost five attempts each.
        # Compiling torch takes longer than installing it; 0 is how pip's environment says --no-compile
        quick = {"PIP_RETRIES": "1", "PIP_NO_COMPILE": "0"}
        return quick | kept | {"PATH": path, "VIRTUAL_ENV": str(self.env)}

    def run(self, command: str, folder: Path) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            ["bash", "-ec", command], cwd=folder, env=self.variables(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def serve(self, command: str, folder: Path) -> tuple[str, str]:
        """Start a server, ask for its page and an answer, and stop it; returns both."""
        port, log = free_port(), folder / "serve.log"
        with log.open("w") as out:
            server = subprocess.Popen(
                ["bash", "-ec", f"exec {command} --port {port}"],
                cwd=folder,
                env=self.variables(),
                stdout=out,
                stderr=out,
            )
        try:
            end = time.monotonic() + 300
            while not _answers(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.2)
            page = _fetched(f"http://127.0.0.1:{port}/")
            asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
            answer = json.loads(_fetched(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(asked)))
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
        assert code in (0, -signal.SIGTERM), log.read_text()  # uvicorn raises the signal again when it is done
        return page, answer["choices"][0]["message"]["content"]


def _fetched(url: str, body: str | None = None) -> str:
    request = urllib.request.Request(url, body.encode() if body else None, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        text: str = response.read().decode()
    return text


def _answers(url: str) -> bool:
    try:
        _fetched(url)
    except OSError:
        return False
    return True


def make_place(folder: Path, python: str) -> Place:
    """Copy the files that git knows or would add, and install by the README's line for CPUs."""
    place = Place(folder / "env", folder / "clone")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (place.clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place.clone / name, follow_symlinks=False)
    subprocess.run([python, "-m", "venv", place.env], check=True)
    for command in holding("--extra-index-url"):
        place.run(command, place.clone)
    return place


@pytest.fixture(scope="module")
def place(once: Once) -> Place:
    """With the CPython that runs the tests."""
    folder = once("readme", lambda folder: make_place(folder, getattr(sys, "_base_executable", sys.executable)))
    return Place(folder / "env", folder / "clone")


def check_commands(place: Place, folder: Path, short: dict[str, str]) -> None:
    """Run the commands below the installation, each made `short`, and the Python program."""
    for command in holding("d2sd serve"):
        kind = next(kind for kind in SHORT if command.startswith(kind))
        wanted = f"{command} {short.get(kind, '')}"
        if kind == "d2sd serve":
            page, answer = place.serve(wanted, folder)
            assert "<html" in page
            assert "Paris" in answer
            continue
        text = place.run(wanted, folder)
        if kind == "d2sd generate":
            assert "def is_palind" in text
        elif kind == "d2sd bench":
            assert re.search(r"│ off .*│ chain ", text, flags=re.S)
            assert " compared with plain decoding's: 0 differ." in text
        else:
            assert str(BUNDLE) in text
            assert not short or "drafter_second" in text
    (program,) = blocks("python")
    assert "Paris" in place.run(shlex.join(["python", "-c", program]), folder)


def test_the_blocks_are_found() -> None:
    assert holding("make demo") == ["make demo", "make test", "source .venv/bin/activate"]
    installs = [command for block in blocks("sh") for command in commands(block) if "pip install" in command]
    assert len(installs) == 2
    assert all(" -c constraints/tested.txt " in command for command in installs)
    run = holding("d2sd serve")
    assert [next(kind for kind in SHORT if line.startswith(kind)) for line in run] == list(SHORT)
    downloaded = holding("--calibrate")  # for a model that is downloaded: the plan alone runs here
    assert downloaded == ["d2sd-build qwen3-8b --plan", "d2sd-build qwen3-8b --pull --calibrate"]
    covered = [*holding("make demo"), *installs, *run, *downloaded]
    assert sorted(covered) == sorted(command for block in blocks("sh") for command in commands(block))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.model
@pytest.mark.subprocess
@pytest.mark.timeout(900)
def test_the_readme_in_short(place: Place, smollm2_bundle: Path, tmp_path: Path) -> None:
    """Outside the clone, with the bundle that `wheel_bundle` built in the same way; by name inside the clone too."""
    assert str(ROOT) not in (smollm2_bundle / "manifest.json").read_text("utf-8")
    assert "drafter_second" in place.run("d2sd-build smollm2-135m --plan", place.clone)
    assert "hf download Qwen/Qwen3-8B " in place.run(holding("--calibrate")[0], tmp_path)
    (tmp_path / BUNDLE).parent.mkdir()
    (tmp_path / BUNDLE).symlink_to(smollm2_bundle.resolve())
    check_commands(place, tmp_path, SHORT)


def interpreters() -> Iterator[tuple[str, str | None]]:
    """Every version that d2sd supports, and a CPython of it: on PATH, or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        known = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
        asked = "import sys; print('%d.%d' % sys.version_info[:2])"
        working = (
            one
            for one in known
            if one
            and subprocess.run([one, "-c", asked], capture_output=True, text=True, check=False).stdout.strip()
            == version
        )
        yield version, next(working, None)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.model
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_readme_as_it_is(version: str, tmp_path: Path) -> None:
    """Inside the clone, and outside it; then the demo, which makes an environment of its own."""
    python = dict(interpreters())[version]
    if python is None:
        pytest.skip(f"there is no CPython {version}")
    place, outside = make_place(tmp_path, python), tmp_path / "outside"
    outside.mkdir()
    for folder in (place.clone, outside):
        check_commands(place, folder, {})
    shutil.rmtree(place.clone / "bundles")
    commands = [command for command in holding("make demo") if command != "make test"]  # a lane of its own
    said = place.run(f"{' && '.join(commands)} && command -v d2sd", place.clone)
    assert said.strip().endswith(str(place.clone / ".venv/bin/d2sd"))
    assert "def is_palindrome" in said
    assert "<svg" in (place.clone / "build/demo/tree.svg").read_text()
    assert "0 differ." in said
