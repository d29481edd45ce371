"""Workers behind Dynamo's frontend: `make dynamo-test`. Every expected text is that of `LLM`, undisturbed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from d2sd.runtime.sampling_params import SamplingParams
from d2sd.serve.llm import LLM
from tests.d2sd.serve.conftest import build_tiny

pytest.importorskip("dynamo.common.backend", reason="needs ai-dynamo: make dynamo-test")

from tests.d2sd.serve.dynamo.fleet import Fleet, Process, Refused, complete, fetch, fleet, metric, post

pytestmark = [pytest.mark.slow, pytest.mark.subprocess, pytest.mark.timeout(1800)]

#: Workers killed in each of the fault tests; issue 15 asks for 50 in all.
KILLS = int(os.environ.get("D2SD_KILLS", "2"))
CLIENTS = 16
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
#: A worker that has no time to finish after SIGTERM.
HASTY, NO_GRACE = ("--drain-timeout", "0.1"), {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose special tokens are in tokenizer.json, which is all that the frontend reads."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    limits = {"max_batch": 16, "max_context": 512}
    return build_tiny(tmp_path_factory.mktemp("tiny"), words=fast, limits=limits)


@pytest.fixture(scope="module")
def live(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("fleet") / "two") as made:
        made.start_frontend("--migration-limit", "3")
        for _ in range(2):
            made.start_worker(bundle, *HASTY, **NO_GRACE)
        made.wait()
        yield made


def requests_of(seed: int, count: int = CLIENTS, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Prompts and options of `count` requests; no two are alike."""
    draw = random.Random(seed)
    return [
        (
            " ".join(f"w{draw.randrange(3, 60)}" for _ in range(draw.randrange(2, 40))),
            {"seed": draw.randrange(2**31), "max_tokens": draw.randrange(60, 200), "ignore_eos": True} | options,
        )
        for _ in range(count)
    ]


def expected(bundle: Path, requests: list[tuple[str, dict[str, Any]]]) -> list[str]:
    with LLM(bundle, verify=False) as llm:
        params = [SamplingParams(**options) for _, options in requests]
        return [answer.text for answer in llm.generate([prompt for prompt, _ in requests], params)]


def busy(worker: Process) -> bool:
    return metric(worker.url, "dynamo_component_inflight_requests") > 0


def streamed(
    live: Fleet, requests: list[tuple[str, dict[str, Any]]], share: float = 0.0, disturb: Any = None
) -> list[str]:
    """The texts of concurrent streams; `disturb` is called when this share of their tokens has arrived."""
    heard, enough = list[str](), share * sum(options["max_tokens"] for _, options in requests)
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [
            pool.submit(complete, live.url, live.model, prompt, heard.append, **options) for prompt, options in requests
        ]
        if disturb is not None:
            while sum(len(piece.split()) for piece in heard) < enough:
                assert not all(future.done() for future in futures), [future.exception() for future in futures]
                time.sleep(0.005)
            disturb()
        return [future.result()[0].strip() for future in futures]


def test_sixteen_clients_get_the_texts_of_the_library(live: Fleet, bundle: Path) -> None:
    requests = requests_of(1, **SAMPLED) + requests_of(2, **GREEDY)
    requests += requests_of(3, 8, temperature=0.7, min_p=0.1, repetition_penalty=1.3)
    requests += requests_of(4, 8, temperature=0.7, presence_penalty=0.3, frequency_penalty=0.7)
    requests += requests_of(5, 8, temperature=1.1, top_k=7, ignore_eos=False, min_tokens=20)
    assert streamed(live, requests) == expected(bundle, requests)


def test_a_request_turns_speculation_off(live: Fleet, bundle: Path) -> None:
    """Such a request takes a step for each token, by the workers' own count, and its text is the same."""
    ((prompt, options),) = requests_of(7, 1, **GREEDY)

    def counts() -> list[float]:
        names = "d2sd_speculative_requests_total", "d2sd_speculative_steps_total"
        return [sum(metric(worker.url, name, switch="off") for worker in live.workers) for name in names]

    before = counts()
    switched = options | {"nvext": {"annotations": ["speculative:false"]}}
    assert streamed(live, [(prompt, switched)]) == expected(bundle, [(prompt, options)])
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, options["max_tokens"]]


def test_a_chat_equals_the_library(live: Fleet, bundle: Path) -> None:
    messages = [{"role": "user", "content": "w5 w9"}]
    body = {"model": live.model, "messages": messages, "max_tokens": 30, "seed": 4, **SAMPLED}
    (whole,) = post(live.url, "/v1/chat/completions", body)
    with LLM(bundle, verify=False) as llm:
        (answer,) = llm.chat(messages, SamplingParams(max_tokens=30, seed=4, **SAMPLED))
    assert whole["choices"][0]["message"]["content"].strip() == answer.text
    assert whole["usage"]["completion_tokens"] == len(answer.token_ids)
    parts = list(post(live.url, "/v1/chat/completions", body | {"stream": True}))
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])
    assert text.strip() == answer.text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": 5000}, "maximum context length is 512 tokens"),
        ({"seed": -1}, "seed out of range"),
        ({"n": 2, "temperature": 1}, "where: n"),
        ({"nvext": {"annotations": ["speculative:off"]}}, "JSON behind speculative:"),
    ],
)
def test_a_refusal_names_the_parameter(live: Fleet, options: dict[str, Any], named: str) -> None:
    body = {"model": live.model, "messages": [{"role": "user", "content": "w5"}], "max_tokens": 4} | options
    with pytest.raises(Refused, match=named) as refused:
        list(post(live.url, "/v1/chat/completions", body))
    assert refused.value.status == 400
    assert complete(live.url, live.model, "w3 w4", max_tokens=2)[1] == "length"


def test_a_client_that_leaves_frees_the_worker(live: Fleet) -> None:
    (prompt, options) = requests_of(6, 1, max_tokens=450)[0]
    body = {"model": live.model, "prompt": prompt, "stream": True} | options
    for _ in range(4):
        events = post(live.url, "/v1/completions", body)
        next(events)
        events.close()
    end = time.monotonic() + 2
    while any(metric(worker.url, "d2sd_num_requests_running") for worker in live.workers):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert all(metric(worker.url, "d2sd_kv_pages_used") == 0 for worker in live.workers)


def test_a_stop_string_ends_the_request(live: Fleet, bundle: Path) -> None:
    """Without ignore_eos: Dynamo's frontend looks for no stop string then."""
    (prompt, options) = requests_of(7, 1, ignore_eos=False, **GREEDY)[0]
    words = expected(bundle, [(prompt, options)])[0].split()
    at = next(i for i in range(3, len(words)) if words[i] not in words[:i])
    text, finish = complete(live.url, live.model, prompt, stop=[f" {words[at]}"], **options)
    assert (text.split(), finish) == (words[:at], "stop")


def test_metrics_and_health(live: Fleet) -> None:
    streamed(live, requests_of(12, 4, **GREEDY))
    for worker in live.workers:
        pages = metric(worker.url, "d2sd_kv_pages", model_name=live.model)
        assert metric(worker.url, "dynamo_component_total_blocks") == pages >= 16 * 512 / 16
        assert metric(worker.url, "d2sd_generation_tokens_total") > 0
        assert fetch(f"{worker.url}/health")["status"] == "ready"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_streams_survive_their_worker(
    live: Fleet, bundle: Path, sampling: dict[str, Any], sent: signal.Signals
) -> None:
    """With SIGTERM the worker has no time to finish: its drain ends after the grace period and its streams move.

    It is sent when a small part of the answers has arrived: on a fast machine they are whole after a second.
    """
    draw, moved = random.Random(f"{sampling} {sent}"), 0.0
    requests = requests_of(8, CLIENTS - 2, max_tokens=440, **sampling)
    requests += requests_of(9, 2, presence_penalty=0.5, min_tokens=30, **sampling)
    wanted = expected(bundle, requests)
    for number in range(KILLS):
        before = metric(live.url, "dynamo_frontend_model_migration_total")

        def disturb() -> None:
            live.end_worker(draw.choice([worker for worker in live.workers if busy(worker)]), sent)

        assert streamed(live, requests, draw.uniform(0.01, 0.15), disturb) == wanted, f"after {number} kills"
        moved += metric(live.url, "dynamo_frontend_model_migration_total") - before
        live.start_worker(bundle, *HASTY, **NO_GRACE)
        live.wait()
    print(f"\n{sent.name} {sampling}: {KILLS} workers, {moved:.0f} streams moved")
    assert moved > 0


def test_overload_is_refused_and_nothing_hangs(live: Fleet, bundle: Path, tmp_path: Path) -> None:
    requests = requests_of(10, 12, **GREEDY)
    wanted = expected(bundle, requests)
    with fleet(tmp_path / "full") as full:
        full.start_frontend("--migration-limit", "3")
        for _ in range(2):
            full.start_worker(bundle, "--max-batch", "2", "--max-waiting", "1")
        full.wait()

        def answer(index: int) -> int:
            prompt, options = requests[index]
            try:
                assert complete(full.url, full.model, prompt, **options)[0].strip() == wanted[index]
            except Refused as error:
                return error.status
            return 200

        with ThreadPoolExecutor(len(requests)) as pool:
            statuses = list(pool.map(answer, range(len(requests))))
        assert statuses.count(200) >= 4
        assert set(statuses) == {200, 529}
        assert answer(0) == 200
        print(f"\n12 requests, 2 workers of 2 running and 1 waiting: {sorted(statuses)}")


def test_routing_by_prefix_raises_the_hit_rate(bundle: Path, tmp_path: Path) -> None:
    """Twelve long prompts, each asked four times: with its own worker a prompt is computed once, else twice."""
    rates, rounds = {}, 4
    prompts = [prompt for prompt, _ in requests_of(11, 12)]
    prompts = [" ".join([prompt] * 30)[:700].rsplit(" ", 1)[0] for prompt in prompts]
    for mode in ("round-robin", "kv"):
        with fleet(tmp_path / mode) as made:
            made.start_frontend("--router-mode", mode, "--kv-cache-block-size", "16")
            for _ in range(2):
                made.start_worker(bundle)
            made.wait()
            for turn in range(rounds):
                order = random.Random(turn).sample(prompts, len(prompts))
                for number, prompt in enumerate(order):
                    complete(made.url, made.model, f"{prompt} w{turn + 3} w{number + 3}", max_tokens=4, **GREEDY)
                    time.sleep(0.1)  # K/V events are on their way
            hits, queries = (
                sum(metric(worker.url, f"d2sd_prefix_cache_{name}_total") for worker in made.workers)
                for name in ("hits", "queries")
            )
            rates[mode] = hits / queries
            logs = "".join(worker.text() for worker in made.workers)
            assert "panicked" not in logs
    print(f"\nprefix hit rate: {rates}")
    assert rates["kv"] > rates["round-robin"] + 0.1
