"""`serve`, `worker` and `triton` refuse bad arguments before they load anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from d2sd.cli.main import main
from d2sd.errors import D2SDError
from d2sd.serve.openai.settings import ServerSettings
from tests.commands import refused

SECONDS = ("inf", "-inf", "nan", "-1", "1e300", "", "\udcff", "five")
COUNTS = ("-1", "10.5", "1" + "0" * 23, "9" * 5000, "nan", "", "\udcff")
NAMES = ("\udcff", "a\x00b", "a\nb", "\x1b[31m")
BAD: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    ("serve", "worker"): {
        "--drain-timeout": SECONDS,
        "--max-batch": ("0", *COUNTS),
        "--max-waiting": COUNTS,
        "--model": NAMES,
    },
    ("serve",): {
        "--request-timeout": ("0", *SECONDS),
        "--max-body": ("0", *COUNTS),
        "--port": ("65536", *COUNTS),
        "--host": ("", "a b", "http://a", *NAMES),
        "--api-key": ("", " ", "a b", "kéy", *NAMES),
        "--allow-host": ("", "a b", "http://a", *NAMES),
        "--allow-origin": ("", "example.com", "ftp://a", "https://a/b", *NAMES),
    },
    ("worker",): {"--namespace": NAMES},
}
CASES = [
    (command, option, value)
    for commands, options in BAD.items()
    for command in commands
    for option, values in options.items()
    for value in values
]


@pytest.mark.parametrize(("command", "option", "value"), CASES, ids=lambda part: ascii(part)[:24])
def test_a_wrong_option_is_named_before_the_bundle_is_opened(command: str, option: str, value: str) -> None:
    refused(
        CliRunner().invoke(main, [command, *(["--dynamo"] * (command == "worker")), "none", f"{option}={value}"]),
        f"Invalid value for '{option}'",
    )


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_key_in_the_environment_is_refused(value: str) -> None:
    result = CliRunner().invoke(main, ["serve", "none"], env={"D2SD_API_KEY": value})
    assert (result.exit_code, "D2SD_API_KEY is empty" in result.stderr) == (2, True)
    assert "D2SD_API_KEY" in CliRunner().invoke(main, ["serve", "--help"]).stdout


@pytest.mark.parametrize("keys", [("",), ("secret", ""), (" ",), ("kéy",), ("a\nb",), ("\udcff",)])
def test_settings_have_no_empty_key(keys: tuple[str, ...]) -> None:
    with pytest.raises(D2SDError, match="API key"):
        ServerSettings(model="m", api_keys=keys)


@pytest.mark.parametrize("arguments", [(), ("none",), ("\udcff",), ("--help",)])
def test_tritons_start_fails_as_commands_do(arguments: tuple[str, ...], tmp_path: Path) -> None:
    run = [sys.executable, "-m", "d2sd.serve.triton.run", *arguments]
    result = subprocess.run(run, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
