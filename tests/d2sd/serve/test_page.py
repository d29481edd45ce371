"""The page at / and the steps that it draws, the metrics, the log and the end of a served process."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from d2sd.bundle.load import Bundle
from d2sd.bundle.serving import make_engine, offer_choices
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.speculation.policy import DDTree, Off
from d2sd.runtime.step_times import StepTimes
from d2sd.serve.openai import app, spans
from d2sd.serve.openai.trace import page
from tests.d2sd.serve.http import Running, serving, wait_until

CHAT: Any = {"messages": [{"role": "user", "content": "w5 w7"}], "max_tokens": 12, "temperature": 1.0, "seed": 6}


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_trace_has_every_step_and_its_tree(server: Running) -> None:
    whole = server.http.post("/v1/chat/completions", json=CHAT | {"return_token_ids": True}).json()
    found = events(server.http.post("/trace", json=CHAT).text)
    assert "".join(t["text"] for e in found for t in e["tokens"]) == whole["choices"][0]["message"]["content"]
    assert sum(len(event["tokens"]) for event in found) == 12
    assert sum(event["accepted"] for event in found) > 0
    for event in found:
        assert ElementTree.fromstring(event["svg"]).tag.endswith("svg")
        assert event["rows"] == 16
    assert server.http.post("/trace", json=CHAT | {"n": 2}).status_code == 400


def test_the_page_runs_nothing_but_its_own_script(server: Running) -> None:
    page = server.http.get("/")
    assert server.http.get("/favicon.ico").headers["content-type"] == "image/svg+xml"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?://|<script>|style=|\son\w+=", page.text)
    for name in re.findall(r'(?:href|src)="([^"]+)"', page.text):
        assert server.http.get(f"/{name}").status_code == 200
    ids = re.findall(r'id="(\w+)"', page.text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'element\("(\w+)"\)', server.http.get("/page.js").text)) <= set(ids)


def test_a_visitor_chooses_a_policy_of_what_an_engine_has(server: Running, bundle: Bundle) -> None:
    """The text is the same; only requests that are alone are served by it."""
    text = server.http.get("/").text
    offered = re.findall(r"<option>(\w+)</option>", text)
    assert f'<option value="">{server.engine.policy.name}, the server\'s</option>' in text
    assert {"off", "chain", "ddtree", "d2sd"} <= set(offered)
    assert server.engine.policy.name not in offered
    texts = set()
    for name in offered:
        found = events(server.http.post("/trace", json=CHAT | {"speculative": {"policy": name}}).text)
        assert {event["policy"] for event in found} == {name}
        texts.add("".join(t["text"] for e in found for t in e["tokens"]))
    assert len(texts) == 1
    own = events(server.http.post("/trace", json=CHAT).text)
    assert {event["policy"] for event in own} == {server.engine.policy.name}
    assert server.http.post("/trace", json=CHAT | {"policy": "off"}).status_code == 400
    plain = make_engine(bundle, policy="off")
    offer_choices(bundle, plain)
    assert list(plain.choices) == ["off", "lookup"]
    one, captured = make_engine(bundle, policy="ddtree"), make_engine(bundle, policy="ddtree")
    offer_choices(bundle, one)
    assert list(one.choices) == ["off", "lookup", "chain", "reanchor", "ddtree"]
    captured.runner.capture = lambda *arguments: None  # type: ignore[assignment]  # graphs, captured for its own policy
    offer_choices(bundle, captured)
    assert list(captured.choices) == ["off", "ddtree"]
    small, large, forecast = DDTree(8), DDTree(16), {"ddtree": ([1.0], [1.0])}
    times = StepTimes.of({(Off(1), 1): 1.0, (small, 1): 1.0, (large, 2): 1.0})  # a larger tree does not pay alone
    captured.selector = PolicySelector([Off(1), small, large], times, forecast)
    offer_choices(bundle, captured)
    assert captured.choices == {"off": Off(1), "ddtree": small}
    assert '<option value="">&lt;b&gt;, the' in bytes(page({}, "<b>").body).decode()


def test_an_answer_ends_where_its_last_tree_does(server: Running) -> None:
    """Drafts behind the last token are neither drawn nor counted."""
    for length in (5, 6, 7):
        found = events(server.http.post("/trace", json=CHAT | {"max_tokens": length}).text)
        assert sum(len(event["tokens"]) for event in found) == length
        for event in found:
            bonus = sum(token["source"] == "bonus" for token in event["tokens"])
            assert event["accepted"] + bonus == len(event["tokens"])
            assert event["svg"].count('class="bonus"') == bonus


def visit(*visits: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what a visitor of the page sees after each answer, and what its script sent; see page_script.mjs."""
    if not (node := shutil.which("node")):
        pytest.skip("needs node")
    harness = Path(__file__).with_name("page_script.mjs")
    script = Path(app.__file__).with_name("page") / "page.js"
    command = [node, str(harness), str(script), json.dumps({"visits": visits})]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    return found["seen"], found["sent"]


def streamed(*found: dict[str, Any], end: bool = True) -> str:
    return "".join(f"data: {json.dumps(one)}\n\n" for one in found) + "data: [DONE]\n\n" * end


def step(words: list[str], policy: str, *, saved: int = 0, shade: str = "", tau: float = 1.0) -> dict[str, Any]:
    tokens = [{"text": word, "source": "first"} for word in words]
    told = {"title": "", "story": "told", "svg": "<svg/>", "key": "<span>keys</span>", "rows": 8}
    return {"tokens": tokens, "saved": saved, "shade": shade, "policy": policy, "tau": tau, **told}


FIELDS = {"prompt": "Why?", "policy": "", "temperature": "0", "seed": "0", "tokens": "96", "key": ""}


def test_the_page_shows_the_figures_of_an_answer() -> None:
    saved = step(["a", "b", "c"], "hybrid", saved=1, shade=" saved by-second")
    steps = [saved, step(["d"], "off", shade=" plain"), step(["e", "f"], "hybrid", tau=2.333)]
    (seen,), (sent,) = visit({"fields": FIELDS | {"policy": "hybrid"}, "text": streamed(*steps)})
    assert sent["body"] == {
        "messages": [{"role": "user", "content": "Why?"}],
        "speculative": {"policy": "hybrid"},
        "temperature": 0,
        "seed": 0,
        "max_tokens": 96,
    }
    figures = {name: seen[name] for name in ("answer", "count", "steps", "tau", "rescued", "mix", "number")}
    assert figures == {
        "answer": "abcdef",
        "count": "6",
        "steps": "3",
        "tau": "2.33",
        "rescued": "33%",
        "mix": "hybrid 67%, off 33%",
        "number": "step 3",
    }
    assert seen["blocks"] == ["turn saved by-second", "turn plain", "turn"]
    assert seen["widths"] == ["90px"], "a tree of 100 pixels shrinks by a tenth at most"
    assert float(seen["rate"]) > 0 <= float(seen["seconds"])
    assert (seen["busy"], seen["idle"]) == ([True, False], [False, True])


def test_an_error_leaves_nothing_of_the_answer_before() -> None:
    message = (
        "the request does not fit the context\n  where: prompt + max_new_tokens\n  found: 30 + 5000 = 5030\n"
        "  expected: at most 2048\n  fix: lower max_new_tokens, or raise limits.max_context in the recipe"
    )
    refused = json.dumps({"error": {"message": message, "param": "max_tokens"}})
    good = {"fields": FIELDS, "text": streamed(step(["a"], "off"))}
    empty = FIELDS | {"temperature": " ", "seed": "", "tokens": "", "key": "secret"}
    (_, seen, proxied), (_, sent, _) = visit(
        good, {"fields": empty, "status": 400, "json": refused}, {"status": 502, "json": "<html>"}
    )
    assert sent["body"] == {"messages": [{"role": "user", "content": "Why?"}]}, "an empty field was sent"
    assert sent["headers"]["authorization"] == "Bearer secret"
    assert {seen[name] for name in ("count", "steps", "tau", "rescued", "seconds", "rate", "mix")} == {"–"}
    assert (seen["tree"], seen["legend"], seen["number"], seen["story"][:8]) == ("", "", "a step", "Point at")
    assert seen["answer"] == (
        "The request does not fit the context; found: 30 + 5000 = 5030; expected: at most 2048. "
        "Ask for fewer tokens, or shorten the prompt."
    )
    assert proxied["answer"] == "The server answered with status 502."


def test_an_answer_is_stopped_or_breaks_off() -> None:
    begun = streamed(step(["a"], "off"), end=False)
    failed = begun + streamed({"error": {"message": "The server is shutting down.\n  fix: try again later"}})
    (stopped, cut, failed_seen), _ = visit(
        {"fields": FIELDS, "text": begun, "hangs": True}, {"text": begun}, {"text": failed}
    )
    assert stopped["answer"] == "aStopped."
    assert stopped["idle"] == [False, True]
    assert cut["answer"] == "aThe connection ended before the answer did."
    assert failed_seen["answer"] == "aThe server is shutting down."


def test_metrics_count_what_was_answered(tiny_bundle: Path) -> None:
    with serving(tiny_bundle) as server:
        bodies = [server.http.post("/v1/chat/completions", json=CHAT | {"seed": seed}).json() for seed in range(3)]
        text = server.http.get("/metrics").text
        values = dict(re.findall(r"^(d2sd_\w+)(?:\{[^}]*\})? ([-\d.e+]+)$", text, re.MULTILINE))
    usage = [body["usage"] for body in bodies]
    assert float(values["d2sd_generation_tokens_total"]) == sum(u["completion_tokens"] for u in usage)
    assert float(values["d2sd_prompt_tokens_total"]) == sum(u["prompt_tokens"] for u in usage)
    steps = float(values["d2sd_accepted_length_count"])
    assert float(values["d2sd_spec_decode_num_drafts_total"]) == steps
    assert float(values["d2sd_verified_rows_total"]) == 16 * steps
    committed = float(values["d2sd_accepted_length_sum"])
    assert float(values["d2sd_spec_decode_num_accepted_tokens_total"]) == committed - steps
    assert float(values["d2sd_time_to_first_token_seconds_count"]) == 3
    assert float(values["d2sd_e2e_request_latency_seconds_count"]) == 3
    assert (values["d2sd_num_requests_running"], values["d2sd_kv_pages_used"]) == ("0.0", "0.0")
    assert f'd2sd_policy_in_force{{model_name="tiny",policy="{server.engine.policy}"}} 1.0' in text
    assert 'd2sd_request_success_total{finished_reason="length",model_name="tiny"} 3.0' in text


def test_a_prompt_that_is_cached_is_reported(tiny_bundle: Path) -> None:
    with serving(tiny_bundle) as server:
        body = {"prompt": list(range(3, 43)), "max_tokens": 2}
        found = [server.http.post("/v1/completions", json=body | {"cache_salt": salt}).json() for salt in ("", "", "x")]
        server.http.get("/metrics")  # reading twice counts nothing twice
        text = server.http.get("/metrics").text
    first, second, other = (one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found)
    assert (first, other) == (0, 0)
    assert 0 < second < 40
    assert found[0]["choices"][0]["text"] == found[1]["choices"][0]["text"]
    assert f'd2sd_prefix_cache_hits_total{{model_name="tiny"}} {second}.0' in text
    assert 'd2sd_prefix_cache_queries_total{model_name="tiny"} 117.0' in text


def test_every_request_is_one_line_of_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:  # uvicorn has a log of its own
        return [record.getMessage() for record in caplog.records if record.name == "d2sd.serve.access"]

    with caplog.at_level(logging.INFO, "d2sd.serve.access"):
        answer = server.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
        server.http.post("/v1/chat/completions", json={}, headers={"x-request-id": "not allowed"})
        wait_until(lambda: len(lines()) == 2)  # a line is written after its answer
    assert answer.headers["x-request-id"] == "mine-1"
    good, bad = map(json.loads, lines())
    assert (good["id"], good["status"], good["path"]) == ("mine-1", 200, "/v1/chat/completions")
    assert (good["prompt_tokens"], good["completion_tokens"], good["finish"]) == (4, 12, ["length"])
    assert 0 < good["seconds_to_first_token"] <= good["seconds"]
    assert (bad["status"], len(bad["id"])) == (400, 32)


def test_spans_carry_the_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    seen: dict[str, Any] = {}

    class Span(trace.NonRecordingSpan):  # type: ignore[misc, name-defined]
        def set_attribute(self, key: str, value: Any) -> None:
            seen[key] = value

    class Tracer(trace.NoOpTracer):  # type: ignore[misc, name-defined]
        def start_as_current_span(self, name: str, *arguments: Any, **options: Any) -> Any:
            seen["name"] = name
            return trace.use_span(Span(trace.INVALID_SPAN_CONTEXT))

    monkeypatch.setattr(trace, "get_tracer", lambda name: Tracer())
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    facts = {"method": "POST", "path": "/v1/completions", "completion_tokens": 7}
    with spans.Spans().request({}, facts):
        pass
    assert not seen
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with spans.Spans().request({b"traceparent": b"x"}, facts):
        pass
    assert seen == {"name": "POST /v1/completions", "gen_ai.usage.output_tokens": 7}


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("drain", [20.0, 0.0])
def test_sigterm_drains(tiny_bundle: Path, drain: float) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # a step of a tiny model takes no time: 20 ms make the answer last
    code = (
        "import time; from d2sd.runtime.engine import Engine; step = Engine.step\n"
        "Engine.step = lambda self: (time.sleep(0.02), step(self))[1]\n"
        "from d2sd.cli.main import main; main()"
    )
    options = ["--port", str(port), "--drain-timeout", str(drain)]
    command = [sys.executable, "-c", code, "serve", str(tiny_bundle), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "startup complete" in line:
                break
        body = CHAT | {"max_tokens": 50, "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        log = process.stderr.read()
        assert process.wait(30) == 0
    assert rest[-1] == "data: [DONE]"
    if drain:
        assert '"finish_reason":"length"' in rest[-2]
    else:
        assert '"shutting_down"' in rest[-2]
    assert "Traceback" not in log
    (request,) = [json.loads(line) for line in log.splitlines() if '"event": "request"' in line]
    assert request["status"] == 200
