"""A user's program, type-checked against these sources with the user's settings: its own mistakes alone are found."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Installed for the tests, but not by `make demo`, or with types that a user does not have.
MISSING = ("triton", "llguidance", "yaml-stubs", "types_", "modelopt", "tensorrt", "nvidia", "d2sd", "__editable__")
PROGRAM = """
import asyncio
from typing import reveal_type

from d2sd import LLM, AsyncLLM, Completion, RequestError, SamplingParams, TokensPrompt
from d2sd.serve.tools import parse_tool_calls


def serial() -> None:
    with LLM("bundle", policy="hybrid") as llm:
        try:
            prompt: TokensPrompt = {"prompt_token_ids": [1, 2]}
            answers: list[Completion] = llm.generate(["a", "b"], SamplingParams(temperature=1, stop="c"))
            answers += llm.generate(prompt) + llm.generate([1, 2]) + llm.generate([[1, 2], [3]])
            answers += llm.chat([{"role": "user", "content": "a"}])
            llm.stream("a").close()
            reveal_type(answers[0].text)
            reveal_type(parse_tool_calls(answers[0].text))
        except RequestError as error:
            print(error.where)


async def main() -> None:
    async with AsyncLLM("bundle") as llm:
        reveal_type(await llm.generate("a", deadline=5))
        async for piece in llm.stream("a"):
            reveal_type(piece)


SamplingParams(temperature="1")
LLM("bundle", policy="fast")
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.timeout(600)
def test_mypy_finds_the_users_mistakes_alone(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(MISSING):
            (packages / package.name).symlink_to(package)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", tmp_path / "venv/bin/python", program.name],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line.partition(": ")[2] for line in done.stdout.splitlines() if "revealed" in line.lower()] == [
        'note: Revealed type is "str"',
        'note: Revealed type is "tuple[str, list[d2sd.serve.tools.ToolCall]]"',
        'note: Revealed type is "list[d2sd.serve.completion.Completion]"',
        'note: Revealed type is "str"',
    ]
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, done.stdout + done.stderr
    assert 'Argument "temperature" to "SamplingParams"' in errors[0]
    assert 'Argument "policy" to "LLM"' in errors[1]
