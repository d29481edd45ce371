"""Commands as a terminal runs them, in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from d2sd.cli.main import main


def run_cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def passed(result: Result) -> Result:
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def succeeds(*arguments: object) -> Result:
    return passed(run_cli(*arguments))


def refused(result: Result, *told: str) -> None:
    """Exit code 2 and a message with these parts, not a traceback."""
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert isinstance(result.exception, SystemExit)
    for part in told:
        assert part in result.stderr
