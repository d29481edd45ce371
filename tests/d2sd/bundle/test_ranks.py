"""Several processes share a target: the same tokens as one process, counted bytes, and an end that names its cause.

Ranks start once a test, which takes seconds; so a test asks many things of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from d2sd import LLM, SamplingParams
from d2sd.bundle import ranks as module
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.ranks import Ranks
from d2sd.bundle.serving import make_engine
from d2sd.errors import BundleError, D2SDError, RankLost
from d2sd.helpers import python_command
from d2sd.modeling.shard import Shard
from d2sd.policies import PolicyName
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.parallel import join as joining
from d2sd.runtime.request import Request
from d2sd.serve.errors import EngineFailed
from tests.d2sd.serve.conftest import build_tiny
from tests.d2sd.serve.test_session import in_child
from tests.runtime.grammar.tokens import tokenizer, vocab_size
from tests.runtime.helpers import run_staggered, some_requests
from tests.tiny import tiny_decoder

FileStore: Any = import_module("torch.distributed").FileStore
#: One of each way to sample, with prompts of 1 to 17 tokens.
REQUESTS = some_requests()[:5]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biases behind sums, a head of its own whose rows cannot be divided evenly, and two K/V heads."""
    decoder = tiny_decoder("qwen3", attention_bias=True, tie=False, vocab=vocab_size())
    return build_tiny(tmp_path_factory.mktemp("ranks"), decoder=decoder, words=tokenizer())


@contextmanager
def shared(path: Path, size: int) -> Iterator[Bundle]:
    bundle = load_bundle(path, tensor_parallel=size)
    assert bundle.ranks is not None
    try:
        yield bundle
    finally:
        bundle.ranks.close()
        assert all(process.returncode is not None for process in bundle.ranks._processes.values())


def answers(bundle: Bundle, policy: PolicyName) -> list[list[int]]:
    """Greedy and sampled requests, joining one by one; then again, with prefixes in the cache."""
    engine = make_engine(bundle, policy=policy, max_batch=4)
    found = [s.answer for s in run_staggered(engine, REQUESTS, gap=2)]
    assert [s.answer for s in run_staggered(engine, REQUESTS, gap=1)] == found
    assert engine.stats.prefix_hit_tokens > 0
    return found


def other_ways(bundle: Bundle) -> tuple[list[list[int]], list[float]]:
    """Grammars, penalties, biases and log-probabilities, which the host has a part in."""
    engine = make_engine(bundle, policy="hybrid", max_batch=4)
    params = [
        SamplingParams(temperature=0.8, seed=1, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(seed=2, logit_bias={5: 3.0, 9: -4.0}, logprobs=2),
        SamplingParams(temperature=1.0, seed=3, prompt_logprobs=1, bad_words_token_ids=((4,), (7, 8))),
    ]
    sequences = engine.generate(Request((3, 1, 4, 1, 5, 9, 2), 14, one) for one in params)
    reported = [entry.logprob for s in sequences for entry in (*(s.logprobs or ()), *(s.prompt_logprobs or ()))]
    assert len(reported) > 14
    return [s.answer for s in sequences], reported


def kill(ranks: Ranks, rank: int) -> None:
    os.kill(ranks._processes[rank].pid, signal.SIGKILL)


def closed(llm: LLM) -> str:
    llm.close()
    return "closed"


@pytest.mark.slow
@pytest.mark.usefixtures("hostile_folder")  # where the other starts
def test_two_ranks(path: Path) -> None:
    """The tokens of one process, until one of the two is killed, of which the next call says which."""
    params = [SamplingParams(temperature=n / 2, seed=n, max_tokens=12, ignore_eos=True) for n in range(3)]
    params.append(SamplingParams(1.0, seed=5, structured_outputs=StructuredOutputsParams(regex="[0-9]{2}-[a-f]{1,3}")))
    prompts = ["1 a", "b", "22", "1 a"]
    with LLM(path, policy="hybrid") as alone:
        expected = [one.token_ids for one in alone.generate(prompts, params)]
    with LLM(path, policy="hybrid", tensor_parallel=2) as llm:
        assert [one.token_ids for one in llm.generate(prompts, params)] == expected
        assert in_child(lambda: llm.generate(prompts)[0].text).startswith("RequestError: An LLM that")
        assert in_child(lambda: closed(llm)) == "closed"
        assert [one.token_ids for one in llm.generate(prompts, params)] == expected
        bundle, _ = llm._session.open()
        body, ranks = bundle.target.config.body, bundle.ranks
        assert (body.num_heads, body.num_kv_heads, body.intermediate_size) == (2, 1, 32)
        assert ranks is not None
        kill(ranks, 1)
        began = time.monotonic()
        with pytest.raises(EngineFailed, match=r"Rank 1 of 2 has ended(.|\n)*signal 9"):
            llm.generate(prompts * 20, params * 20)
        assert time.monotonic() - began < 10


@pytest.mark.slow
def test_four_ranks(path: Path) -> None:
    """Two ranks have the same K/V head."""
    whole = load_bundle(path)
    plain = answers(whole, "off")
    with shared(path, 4) as bundle:
        assert bundle.target.config.body.num_kv_heads == 1
        assert answers(bundle, "d2sd") == plain
        (found, reported), (expected, alone) = other_ways(bundle), other_ways(whole)
        assert found == expected
        assert reported == pytest.approx(alone, abs=1e-3)


@pytest.mark.slow
def test_an_error_in_a_pass_of_rank_0_does_not_delay_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other waits for its sums with this one, which never come."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with shared(path, 2) as bundle:
        engine = make_engine(bundle, policy="off")
        monkeypatch.setattr(ModelRunner, "verify", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            run_staggered(engine, REQUESTS[:1])
        began = time.monotonic()
    assert time.monotonic() - began < 5


def test_what_cannot_be_shared(path: Path, tmp_path: Path) -> None:
    with pytest.raises(D2SDError, match="4 query heads"):
        load_bundle(path, tensor_parallel=3)
    with pytest.raises(D2SDError, match="No such device"):
        load_bundle(path, tensor_parallel=2, device="cuda")


# --- Ranks that end, or hang, while they load: small programs in place of real ones ---------------------------------

DIES, HANGS = ("sh", "-c", "exit 3"), ("sh", "-c", "exec sleep 1000")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders are in which ranks meet; the limits of their patience are short."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(module, "_BLAME", 0.1)
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    return temporary


def others_run(monkeypatch: pytest.MonkeyPatch, *commands: tuple[str, ...]) -> None:
    """Let ranks 1, 2, ... run these commands."""
    given = iter(commands)
    monkeypatch.setattr(module, "python_command", lambda *arguments: [*next(given), *arguments])


def test_a_rank_that_ends_on_its_first_line_ends_loading(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_run(monkeypatch, DIES)
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"Rank 1 of 2 has ended(.|\n)*exit code 3"):
        load_bundle(path, tensor_parallel=2)
    assert time.monotonic() - began < 10
    assert not list(folder.iterdir())


def test_a_rank_that_ends_before_it_connects_ends_loading(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is inside gloo then, which waits for a minute."""
    others_run(monkeypatch, HANGS)
    ranks, gloo = Ranks(path, 2, "cpu"), joining._gloo
    store = FileStore(ranks._folder.name + "/store", 2)
    store.set("ready1", "1")

    def connect(*args: Any) -> Any:
        Timer(0.1, kill, (ranks, 1)).start()
        return gloo(*args)

    monkeypatch.setattr(joining, "_gloo", connect)
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"Rank 1 of 2 has ended(.|\n)*signal 9"):
        ranks.join(Shard(0, 2))
    assert time.monotonic() - began < 10
    ranks.close()
    assert not list(folder.iterdir())


def test_ranks_that_hang_are_named_in_time(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others_run(monkeypatch, HANGS, HANGS, HANGS)
    monkeypatch.setattr(module, "_LOADING", 0.2)
    with pytest.raises(RankLost, match=r"Rank 1, 2, 3 of 4 does not answer"):
        load_bundle(path, tensor_parallel=4)
    others_run(monkeypatch, HANGS, HANGS)
    ranks = Ranks(path, 3, "cpu")
    store = FileStore(ranks._folder.name + "/store", 3)
    store.set("ready1", "1")
    with pytest.raises(RankLost, match=r"Rank 2 of 3 does not answer"):
        ranks.join(Shard(0, 3))
    assert all(process.returncode == -signal.SIGKILL for process in ranks._processes.values())
    ranks.close()
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("folder")
def test_a_rank_that_hangs_in_a_pass_is_told_from_those_that_waited_for_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others end with the code for a lost peer, when their wait is over; who listens is told once."""
    others_run(monkeypatch, ("sh", "-c", f"exit {module.PEER_LOST}"), HANGS)
    ranks, told = Ranks(path, 3, "cpu"), list[D2SDError]()
    ranks.on_failure(told.append)
    assert "Rank 2 of 3 does not answer" in str(ranks.lost())
    assert told == [ranks.lost()]
    others_run(monkeypatch, HANGS)
    ranks = Ranks(path, 2, "cpu")
    assert "Rank 1 of 2 does not answer" in str(ranks.lost())


def test_an_engine_that_cannot_be_made_leaves_no_rank(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_run(monkeypatch, HANGS)
    whole, made = load_bundle(path), list[Ranks]()

    def load(path: Path, **options: object) -> Bundle:
        made.append(Ranks(path, 2, "cpu"))
        return replace(whole, ranks=made[0])

    def fail(*args: object, **options: object) -> None:
        raise BundleError("No.")

    monkeypatch.setattr("d2sd.bundle.load.load_bundle", load)
    monkeypatch.setattr("d2sd.serve.session.make_engine", fail)
    with pytest.raises(BundleError) as held:
        LLM(path, tensor_parallel=2)
    assert held  # and with its traceback everything that a finalizer would wait for
    assert made[0]._processes[1].returncode is not None
    assert not list(folder.iterdir())


@pytest.mark.subprocess
@pytest.mark.usefixtures("hostile_folder")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_that_is_stopped_does_not_outlive_rank_0(tmp_path: Path, number: signal.Signals) -> None:
    """Nor does the folder in which they meet."""
    folder = tmp_path / "d2sd-ranks-1"
    folder.mkdir()
    command = python_command("d2sd.bundle.rank_process", str(folder))
    code = f"""
import os, signal, subprocess, time
rank = subprocess.Popen({command}, stdin=subprocess.PIPE)
while len(os.listdir(f"/proc/{{rank.pid}}/task")) < 2:  # it reads
    time.sleep(0.02)
os.kill(rank.pid, signal.SIGSTOP)
print(rank.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        parent.send_signal(number)
    end = time.monotonic() + 10
    while folder.exists() or Path(f"/proc/{rank}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
