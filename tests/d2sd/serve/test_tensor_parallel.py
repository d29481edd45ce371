"""`d2sd serve --tensor-parallel 2`: what it answers, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from d2sd import LLM, SamplingParams
from tests.d2sd.serve.http import wait_until
from tests.processes import alive

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.http = process, httpx.Client(base_url=url, timeout=30)

    def others(self) -> list[int]:
        """Ids of the processes of the other ranks."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        ids = [int(number) for file in children for number in file.read_text().split()]
        return [number for number in ids if b"rank_process" in Path(f"/proc/{number}/cmdline").read_bytes()]


MAIN = "from d2sd.cli.main import main; main()"
#: The same with a pass that may take three seconds.
IMPATIENT = f"import datetime, d2sd.runtime.parallel.join as j; j._PASS = datetime.timedelta(seconds=3); {MAIN}"


def command(bundle: Path, program: str = MAIN) -> list[str]:
    return [sys.executable, "-c", program, "serve", str(bundle), "--port", "0", "--tensor-parallel", "2"]


@contextmanager
def serving(bundle: Path, program: str = MAIN) -> Iterator[Served]:
    with subprocess.Popen(command(bundle, program), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        served, url = Served(process, ""), None
        try:  # a time limit may end the test while it reads
            for line in process.stderr:
                if found := re.search(r"serving .* at (http://[0-9.:]+)", line):
                    url = found[1]
                if url and "startup complete" in line:
                    break
            assert url is not None
            served = Served(process, url)
            yield served
        finally:
            process.kill()
            wait_until(lambda: not any(map(alive, served.others())), 10)


def test_a_killed_rank_ends_the_server(tiny_bundle: Path) -> None:
    """The client of a stream gets an error, the process ends with code 2, and its last words name the rank."""
    with serving(tiny_bundle) as served:
        body = {"model": "tiny", "prompt": "w1 w2", "max_tokens": 12, "temperature": 0}
        answer = served.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with LLM(tiny_bundle) as llm:
            assert answer == llm.generate("w1 w2", SamplingParams(max_tokens=12))[0].text
        (other,) = served.others()
        with served.http.stream("POST", "/v1/completions", json=body | {"stream": True, "n": 8}) as stream:
            os.kill(other, signal.SIGKILL)
            began = time.monotonic()
            text = "".join(stream.iter_text())  # it ends
        assert "[DONE]" in text or "error" in text
        _, last = served.process.communicate(timeout=10)
        assert time.monotonic() - began < 10
        assert served.process.returncode == 2
        assert "Rank 1 of 2 has ended" in last
        assert "signal 9" in last


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.full)]
)
def test_no_rank_outlives_rank_0(number: signal.Signals, code: int, tiny_bundle: Path) -> None:
    with serving(tiny_bundle) as served:
        others = served.others()
        served.process.send_signal(number)
        assert served.process.wait(10) == code
        wait_until(lambda: not any(map(alive, others)), 5)


def test_a_rank_that_stops_in_a_pass_ends_the_server(tiny_bundle: Path) -> None:
    with serving(tiny_bundle, IMPATIENT) as served:
        (other,) = served.others()
        os.kill(other, signal.SIGSTOP)
        body = {"model": "tiny", "prompt": "w1 w2", "max_tokens": 12}
        assert served.http.post("/v1/completions", json=body).status_code == 503
        _, last = served.process.communicate(timeout=30)
        assert served.process.returncode == 2
        assert "Rank 1 of 2 does not answer" in last
        wait_until(lambda: not alive(other), 5)


@pytest.mark.parametrize("stopped", [False, True])
def test_sigterm_while_ranks_load_leaves_neither_a_folder_nor_a_rank(
    tiny_bundle: Path, tmp_path: Path, stopped: bool
) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command(tiny_bundle), stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        served, end = Served(process, ""), time.monotonic() + 60
        while not (others := served.others()) or len([*Path(f"/proc/{others[0]}/task").iterdir()]) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        if stopped:
            os.kill(others[0], signal.SIGSTOP)
        process.terminate()
    wait_until(lambda: not any(map(alive, others)), 10)
    assert not list(tmp_path.glob("d2sd-ranks-*"))
