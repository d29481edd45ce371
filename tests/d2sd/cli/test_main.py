"""The commands: their errors, and what --plan and inspect say. Their flags are in docs/reference/cli.md."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from safetensors import safe_open

from d2sd.cli.build import build
from d2sd.cli.inspect import inspect
from d2sd.cli.main import COMMANDS, build_main, main
from tests.commands import passed
from tests.convert.helpers import add_calibration, write_project


def invoke(command: click.Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def loaded(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_help_says(name: str) -> None:
    """The list is written without importing the commands."""
    assert loaded(name).name == name
    assert (loaded(name).help or "").partition("\n")[0] == COMMANDS[name]
    assert COMMANDS[name] in " ".join(invoke(main, "--help").output.split())


def test_every_help_has_an_example() -> None:
    commands = [main, *map(loaded, COMMANDS)]
    for group in commands[1:]:
        commands += group.commands.values() if isinstance(group, click.Group) else ()
    for command in commands:
        shown = passed(invoke(command, "--help"))
        assert re.search("^      d2sd[ -]", shown.output, re.M), command.name


STAGES = ["fetch", "target", "drafter_first", "drafter_second", "check", "manifest"]


def stages_of(built: Result) -> list[str]:
    return [line.split()[0] for line in built.stderr.splitlines() if " done after " in line]


def test_build_then_inspect(recipe: Path, tmp_path: Path) -> None:
    built = passed(invoke(main, "build", recipe, "--out", tmp_path / "out", "--set", "tree.branches=2", "-v"))
    assert built.stdout.strip() == str(tmp_path / "out")
    assert stages_of(built) == STAGES
    shown = passed(invoke(inspect, tmp_path / "out"))
    for part in ("family llama", "precision      fp32", "branches 2, row budget 16", "role variable_prefix", "torch "):
        assert part in shown.stdout
    told = " ".join(shown.stdout.split())
    assert "fit tokens a step of each drafter under each reading of its config" in told
    assert "a build fails where another reading commits 1.05 times as many as the declared one or more" in told


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("output", [None, "built/here"])
def test_where_a_bundle_goes(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke(build, recipe, "--set", f"output={output or 'null'}").exit_code == 0
    expected = recipe.parent / output if output else tmp_path / "bundles" / "tiny"
    assert (expected / "manifest.json").is_file()


def test_plan_reads_no_weights_and_writes_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HeadersOnly:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = safe_open(*args, **kwargs)

        def __enter__(self) -> HeadersOnly:
            return self

        def __exit__(self, *error: object) -> None: ...

        def __getattr__(self, name: str) -> Any:
            assert name in ("keys", "get_slice"), "weights were read"
            return getattr(self._file, name)

    monkeypatch.setattr("d2sd.convert.checkpoint.headers.safe_open", HeadersOnly)
    before = sorted(tmp_path.rglob("*"))
    shown = passed(invoke(main, "build", recipe, "--plan", "--out", tmp_path / "out", "--set", "exact=true"))
    assert sorted(tmp_path.rglob("*")) == before
    told = shown.stdout
    assert "precision      fp32, batch-invariant (exact)" in told
    assert "fetch -> target -> drafter_first -> drafter_second -> check -> manifest" in told
    assert "3 layers, hidden 32, 4/2 heads of 8, vocabulary 64" in told
    assert "reads target layers 0, 1" in told
    # K/V of the target: 2 requests x 64 tokens x 2 (K, V) x 3 layers x 2 heads x 8 x 4 bytes = 49,152 bytes
    assert "29,920" in told
    assert "0.1 MB" in told


@pytest.mark.slow
def test_plan_and_build_name_the_calibration_stage(recipe: Path, tmp_path: Path) -> None:
    add_calibration(recipe)
    stages = [*STAGES[:4], "calibration", *STAGES[4:]]
    assert " -> ".join(stages) in invoke(main, "build", recipe, "--plan").stdout
    built = invoke(main, "build", recipe, "--out", tmp_path / "out", "-v")
    assert stages_of(built) == stages


def test_plan_of_a_target_that_is_not_fetched_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D2SD_CACHE", str(tmp_path / "cache"))
    pypi = {"package": "p", "version": "1.0", "file": "a.gguf", "sha256": "0" * 64}
    shown = passed(invoke(main, "build", write_project(tmp_path / "project", target={"pypi": pypi}), "--plan"))
    assert "p==1.0" in shown.stdout
    assert "not in the cache" in shown.stdout
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("command", "arguments", "told"),
    [
        ("build", ["none.yaml"], "none.yaml"),
        ("build", ["RECIPE", "--set", "tree.x=1"], "tree.x"),
        ("inspect", ["nowhere"], "nowhere"),
        ("calibrate", ["nowhere", "--out", "c.json"], "nowhere"),
        ("bench", ["nowhere"], "nowhere"),
        ("convert", ["nowhere", "--to", "z-lab", "-o", "out"], "nowhere"),
    ],
)
def test_user_errors_are_a_message_and_exit_code_2(recipe: Path, command: str, arguments: list[str], told: str) -> None:
    failed = invoke(main, command, *[str(recipe) if a == "RECIPE" else a for a in arguments])
    assert failed.exit_code == 2
    assert failed.stderr.startswith("error: ")
    assert told in failed.stderr
    assert failed.stdout == ""


def test_d2sd_build_is_the_same_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["d2sd-build", "none.yaml"])
    with pytest.raises(SystemExit) as ended:
        build_main()
    assert ended.value.code == 2
    assert "none.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--version", "-h"])
def test_both_programs_have_a_version_and_a_short_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    for program, run in (("d2sd", main), ("d2sd-build", build_main)):
        monkeypatch.setattr(sys, "argv", [program, flag])
        with pytest.raises(SystemExit) as ended:
            run()
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert ("Usage: " if flag == "-h" else version("d2sd")) in shown
