"""How commands fail: a message and an exit code, never a traceback, whatever the terminal."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from rich.table import Table

from d2sd.cli.main import main
from d2sd.cli.options import device_option
from d2sd.cli.report import Reporting, ReportingGroup
from d2sd.console import show_table
from d2sd.errors import D2SDError
from d2sd.io import printable
from tests.commands import refused

#: Runs the command line as its program does; the arguments follow.
PROGRAM = [sys.executable, "-c", "from d2sd.cli.main import main; main(prog_name='d2sd')"]


def failing(error: BaseException) -> Result:
    @click.group(cls=ReportingGroup)
    def group() -> None: ...

    @group.command(cls=Reporting)
    def command() -> None:
        click.echo("some output")
        raise error

    alone, below = CliRunner().invoke(command, []), CliRunner().invoke(group, ["command"])
    assert (alone.exit_code, alone.stderr.splitlines()[-3:]) == (below.exit_code, below.stderr.splitlines()[-3:])
    assert alone.stdout == "some output\n"
    return alone


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (D2SDError("What.", where="a\x1b[31mb", found="x"), 2, "error: What.\n  where: a\ufffd[31mb\n  found: x\n"),
        (
            OSError(errno.ENOSPC, "No space", "a"),
            2,
            "error: No space\n  where: a\n  fix: free some space, and run again\n",
        ),
        (OSError(errno.EFBIG, "Too large"), 2, "error: Too large\n  fix: raise the limit of file sizes, `ulimit -f`\n"),
        (OSError("no number (os error 19)"), 2, "error: no number (os error 19)\n"),
        (OSError(), 2, "error: OSError\n"),
        (OSError(errno.EACCES, "No", "a\x07"), 2, "error: No\n  where: a\ufffd\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (MemoryError("16 GB"), 2, "error: Out of memory.\n  found: 16 GB\n  fix: lower limits.max_batch\n"),
        (click.ClickException("Which?"), 1, "Error: Which?\n"),
        (SystemExit(3), 3, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_is_a_message_and_an_exit_code(error: BaseException, code: int, text: str) -> None:
    result = failing(error)
    assert (result.exit_code, result.stderr) == (code, text)


@pytest.mark.parametrize("error", [KeyError("a"), RuntimeError("x" * 10_000), EOFError()])
def test_a_bug_is_called_a_bug_and_shows_its_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.delenv("D2SD_DEBUG", raising=False)
    result = failing(error)
    assert result.exit_code == 70
    assert f"internal error: {type(error).__name__}" in result.stderr
    assert "please report it" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr) < 1000
    monkeypatch.setenv("D2SD_DEBUG", "1")
    assert "Traceback" in failing(error).stderr


def test_an_interrupt_while_a_command_is_imported_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("d2sd.cli.main.import_module", interrupt)
    result = CliRunner().invoke(main, ["build", "x.yaml"])
    assert (result.exit_code, result.stderr) == (130, "\ninterrupted\n")


@pytest.mark.parametrize(
    "error", [ImportError("circular import"), D2SDError("The tokenizer cannot be read."), KeyboardInterrupt()], ids=repr
)
def test_an_interrupt_that_a_library_turned_into_an_error_ends_with_130(error: BaseException) -> None:
    @click.command(cls=Reporting)
    def command() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    result = CliRunner().invoke(command, [])
    assert (result.exit_code, result.stderr.strip()) == (130, "interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert failing(ImportError("circular import")).exit_code == 70  # nothing is remembered


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"]], ids=" ".join)
def test_a_full_stdout_is_a_message(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*PROGRAM, *arguments], check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    told = "error: No space left on device\n  fix: free some space, and run again\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_a_terminal_without_unicode_gets_escapes(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    program = (
        "import click; from rich.console import Console; from d2sd.cli.report import Reporting\n"
        "@click.command(cls=Reporting)\ndef run(): Console().print('✓ \\ud800')\nrun()"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "\\u2713 \\ud800\n"), done.stderr


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "loop", "x" * 300])
@pytest.mark.parametrize("command", [["inspect"], ["build"], ["build", "--plan"], ["calibrate", "--out", "o"]])
def test_a_path_that_cannot_be_a_file_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    refused(CliRunner().invoke(main, [*command, path]), "rror: ")


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\tb\nc\x1b]0;title\x07\x9b2J\x7f d²é✓") == "a\tb\nc\ufffd]0;title\ufffd\ufffd2J\ufffd d²é✓"


def test_a_warning_of_the_log_is_a_line_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has set up logs but `serve`; what runs slower than it could is told all the same."""
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's

    @click.command(cls=Reporting)
    def command() -> None:
        logging.getLogger("d2sd.plugins.dispatch").warning("%s runs as plain PyTorch", "attention\x1b[2J")
        logging.getLogger("d2sd.bundle").info("some detail")
        click.echo("a result")

    found = CliRunner().invoke(command, [])
    assert (found.exit_code, found.stdout) == (0, "a result\n")
    assert found.stderr == "warning: attention\ufffd[2J runs as plain PyTorch\n"


def test_a_narrow_terminal_cuts_no_name() -> None:
    console = Console(width=20, file=io.StringIO())
    table = Table("model", "parameters", "on disk")
    table.add_row("drafter_second", "134,515,008", "538.1 MB")
    show_table(table, console)
    assert "drafter_second │ 134,515,008 │ 538.1 MB │" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", ["", "foo", "mps", "meta", "cuda:", "cuda:x", "cuda:-1", "cuda:99", "CPU"])
def test_a_device_that_does_not_exist_is_refused_before_work_begins(device: str) -> None:
    @click.command(cls=Reporting)
    @device_option
    def run(device: str) -> None:
        raise AssertionError(device)

    refused(
        CliRunner().invoke(run, ["--device", device]),
        f"error: No such device.\n  where: device\n  found: {device!r}\n  expected: cpu",
    )


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cuda"), (2, "cuda:1")])
def test_a_device_that_exists_is_taken(monkeypatch: pytest.MonkeyPatch, gpus: int, device: str) -> None:
    @click.command(cls=Reporting)
    @device_option
    def run(device: str) -> None:
        click.echo(device)

    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert CliRunner().invoke(run, ["--device", device]).stdout == f"{device}\n"
