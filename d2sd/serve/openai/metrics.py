"""Prometheus metrics of one server: vLLM's names behind `d2sd_` or its own `vllm:`, and what speculation adds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from d2sd.runtime.stats import COPY, FIRST_DRAFT, EngineStats

if TYPE_CHECKING:
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.sequence import Output, Sequence
    from d2sd.serve.openai.settings import MetricsPrefix

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

#: Names that vLLM has for the same figures (https://docs.vllm.ai/en/stable/usage/metrics).
_SHARED = frozenset({
    "num_requests_running", "num_requests_waiting", "num_preemptions", "kv_cache_usage_perc", "prefix_cache_queries",
    "prefix_cache_hits", "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "prompt_tokens", "generation_tokens",
    "request_prompt_tokens", "request_generation_tokens", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
})  # fmt: skip


class Metrics:
    """The metrics of one engine, in a registry of their own."""

    def __init__(self, engine: Engine, model: str, prefix: MetricsPrefix = "d2sd") -> None:
        self.registry = CollectorRegistry()
        self._engine, self._model, self._prefix = engine, model, prefix
        self._state: EngineStats = engine.stats  # as of the last `refresh`
        self._gauge("num_requests_running", "Requests in the running batch.", lambda: self._state.running)
        self._gauge("num_requests_waiting", "Requests that wait for the batch.", lambda: self._state.waiting)
        self._gauge(
            "kv_cache_usage_perc",
            "Share of the K/V pages in use; 1 is all.",
            lambda: self._state.pages_used / self._state.pages_total,
        )
        self._gauge("kv_pages", "K/V pages in each pool.", lambda: self._state.pages_total)
        self._gauge("kv_pages_used", "K/V pages that running requests use.", lambda: self._state.pages_used)
        self._gauge("kv_pages_cached", "K/V pages that only the prefix cache holds.", lambda: self._state.pages_cached)
        if self._state.slots_total:
            self._gauge("state_slots", "Slots of recurrent state.", lambda: self._state.slots_total)
            self._gauge("state_slots_used", "Slots of running requests.", lambda: self._state.slots_used)
            self._gauge("state_slots_cached", "Slots with snapshots.", lambda: self._state.slots_cached)
        self._totals = {
            self._counter("prefix_cache_queries", "Prompt tokens looked up."): "prefix_queried_tokens",
            self._counter("prefix_cache_hits", "Prompt tokens found."): "prefix_hit_tokens",
            self._counter("prefill_tokens", "Prompt tokens computed."): "prefill_tokens",
            self._counter("num_preemptions", "Requests preempted for lack of K/V pages."): "preemptions",
        }
        self._in_force = Gauge(
            self._name("policy_in_force"),
            "1 for the policy of the last step.",
            ["model_name", "policy"],
            registry=self.registry,
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time of each token after the first.", _SECONDS
        )
        self.latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self.phases = {
            name: self._histogram(f"request_{name}_time_seconds", text, _SECONDS)
            for name, text in {
                "queue": "From arrival to a place in the batch.",
                "prefill": "From a place in the batch to the first token.",
                "decode": "From the first token to the last.",
                "inference": "From a place in the batch to the last token.",
            }.items()
        }
        self._lengths = [
            self._histogram(f"request_{name}_tokens", text, [2.0**power for power in range(21)])
            for name, text in (("prompt", "Tokens of a prompt."), ("generation", "Tokens of an answer."))
        ]
        self.accepted_length = self._histogram(
            "accepted_length", "Tokens committed by a step, bonus included.", [float(n) for n in range(1, 17)]
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._drafts = self._counter("spec_decode_num_drafts", "Steps that verified a draft.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted, bonus excluded.")
        self._rows = self._counter("verified_rows", "Tree rows verified, the anchor's included.")
        self._rescues = self._counter("spec_decode_rescues", "Steps won by a branch of the second pass.")
        self._copies = self._counter("spec_decode_copies", "Steps won by a copy of earlier text.")
        self._ended = self._labelled("request_success", "Requests that ended, by reason.", "finished_reason")
        self._switched = [
            self._labelled(f"speculative_{name}", f"{what} that ended, by switch.", "switch")
            for name, what in (("requests", "Requests"), ("steps", "Steps of requests"), ("rows", "Rows of requests"))
        ]

    def text(self) -> bytes:
        """The exposition text of Prometheus."""
        self.refresh()
        return generate_latest(self.registry)

    def refresh(self) -> None:
        """Read the engine's counts into the registry; gauges read them at each collection."""
        before, now = self._state, self._engine.stats
        for counter, name in self._totals.items():
            counter.inc(getattr(now, name) - getattr(before, name))
        self._state = now
        self._in_force.clear()
        self._in_force.labels(self._model, now.policy).set(1)

    def ended(self, sequence: Sequence | None, reason: str) -> None:
        """Count a request that has ended; `sequence` is None for one that never reached the engine."""
        self._ended.labels(self._model, reason).inc()
        if sequence is None:
            return
        stats = sequence.stats
        self._prompt.inc(len(sequence.request.prompt))
        for histogram, tokens in zip(self._lengths, (sequence.request.prompt, sequence.answer), strict=True):
            histogram.observe(len(tokens))
        for length, steps in stats.accepted.items():
            for _ in range(steps):
                self.accepted_length.observe(length)
        drafted = stats.verified_nodes - stats.steps
        self._rows.inc(stats.verified_nodes)
        for counter, count in zip(self._switched, (1, stats.steps, stats.verified_nodes), strict=True):
            counter.labels(self._model, sequence.request.policy or "on").inc(count)
        self._drafts.inc(sum(steps for policy, steps in stats.policies.items() if not policy.startswith("off")))
        self._drafted.inc(drafted)
        self._accepted.inc(stats.tokens - stats.steps)
        self._rescues.inc(sum(n for branch, n in stats.accepted_branches.items() if branch > FIRST_DRAFT))
        self._copies.inc(stats.accepted_branches[COPY])

    def _name(self, name: str) -> str:
        return f"vllm:{name}" if self._prefix == "vllm" and name in _SHARED else f"d2sd_{name}"

    def _gauge(self, name: str, text: str, read: Any) -> None:
        gauge = Gauge(self._name(name), text, ["model_name"], registry=self.registry)
        gauge.labels(self._model).set_function(read)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(self._name(name), text, ["model_name"], registry=self.registry).labels(self._model)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(self._name(name), text, ["model_name", label], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Any) -> Histogram:
        histogram = Histogram(self._name(name), text, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model)


class RequestTimer:
    """Measures one request from its arrival; an output of k tokens is k latencies of a k-th of its time."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._begun = metrics, time.monotonic()
        self._last: float | None = None
        self.first_token: float | None = None  # seconds

    def output(self, output: Output) -> None:
        """Record an output when it arrives."""
        now, count = time.monotonic(), len(output.tokens)
        if not count:
            return
        if self._last is None:
            self.first_token = now - self._begun
            self._metrics.first_token.observe(self.first_token)
        else:
            for _ in range(count):
                self._metrics.inter_token.observe((now - self._last) / count)
        self._last = now
        self._metrics._generated.inc(count)

    def end(self, sequence: Sequence | None, reason: str) -> None:
        """Record the end, as `Metrics.ended` does."""
        self._metrics.latency.observe(time.monotonic() - self._begun)
        if sequence is not None and sequence.admitted is not None:
            queued = max(sequence.admitted - self._begun, 0.0)  # an idle engine may be first
            self._metrics.phases["queue"].observe(queued)
            if self.first_token is not None and self._last is not None:
                run = self._last - self._begun - queued
                prefill = max(self.first_token - queued, 0.0)
                for name, seconds in (("prefill", prefill), ("decode", run - prefill), ("inference", run)):
                    self._metrics.phases[name].observe(seconds)
        self._metrics.ended(sequence, reason)
