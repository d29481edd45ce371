"""Clients and agent frameworks against the server, in an environment of their own: some want an older OpenAI SDK.

`make client-test` makes the environment and sets D2SD_CLIENTS_PYTHON to its interpreter.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.d2sd.serve.http import Running

FOLDER = Path(__file__).parent
PYTHON = os.environ.get("D2SD_CLIENTS_PYTHON")


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.skipif(PYTHON is None, reason="D2SD_CLIENTS_PYTHON names no environment: make client-test")
@pytest.mark.parametrize("child", sorted(path.name for path in FOLDER.glob("*_child.py")))
def test_a_client(request: pytest.FixtureRequest, child: str) -> None:
    server: Running = request.getfixturevalue("agent" if child != "thinking_child.py" else "thinker")
    if child == "thinking_child.py":
        request.getfixturevalue("say")("<think>\nIs it?\n</think>\n\nIt is cold.")
    environment = os.environ | {
        "OPENAI_API_KEY": "key",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download at import
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = [str(PYTHON), str(FOLDER / child), f"{server.url}/v1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.service.live == 0
