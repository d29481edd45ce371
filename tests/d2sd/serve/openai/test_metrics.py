"""Gauges of what a target may have or not, and the phases of requests."""

from __future__ import annotations

import re
from unittest.mock import MagicMock

import pytest

from d2sd.runtime.stats import EngineStats
from d2sd.serve.openai.app import Server
from d2sd.serve.openai.metrics import Metrics
from d2sd.serve.openai.settings import MetricsPrefix
from tests.d2sd.serve.http import Running
from tests.test_layers import ROOT


@pytest.mark.parametrize("slots", [(), (9, 3, 2)])
def test_slots_of_targets_with_a_recurrent_state(slots: tuple[int, ...]) -> None:
    stats = EngineStats(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, "chain", *slots)
    registry = Metrics(MagicMock(stats=stats), "m").registry
    names = ("d2sd_state_slots", "d2sd_state_slots_used", "d2sd_state_slots_cached")
    found = [registry.get_sample_value(name, {"model_name": "m"}) for name in names]
    assert tuple(found) == (slots or (None, None, None))


def families(text: str, prefix: str) -> set[str]:
    return {line.split()[2] for line in text.splitlines() if line.startswith(f"# TYPE {prefix}")}


def test_dashboards_for_vllm_find_its_names() -> None:
    """All that docs/serve.md has in the column of vLLM's, and nothing of d2sd's own; no other name differs."""
    stats = EngineStats(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, "chain", 9, 3, 2)
    prefixes: tuple[MetricsPrefix, ...] = ("d2sd", "vllm")
    ours, theirs = (Metrics(MagicMock(stats=stats), "m", prefix).text().decode() for prefix in prefixes)
    table = (ROOT / "docs/serve.md").read_text().split("| vLLM's | d2sd's own |")[1].split("\n\n")[0]
    columns = [
        re.findall(r"`([a-z0-9_]{10,})", line.split("|")[1]) for line in table.splitlines() if line.count("|") > 2
    ]
    shared = {f"vllm:{name}" for names in columns for name in names}
    assert len(shared) > 20
    found = {name for name in families(theirs, "vllm:") if not name.endswith("_created")}
    assert found == shared
    assert not families(ours, "vllm:")
    assert {name.removeprefix("d2sd_") for name in families(ours, "d2sd_")} == {
        name.removeprefix("d2sd_").removeprefix("vllm:")
        for name in families(theirs, "d2sd_") | families(theirs, "vllm:")
    }
    for kind in ("_created", "_total"):
        assert ours.count(kind) == theirs.count(kind)


def test_the_server_takes_the_prefix_from_its_settings(server: Running) -> None:
    own = server.server
    assert own.metrics.text().startswith(b"# HELP d2sd_")
    other = Server(own.bundle, own.engine.engine, own.settings.model_copy(update={"metrics_prefix": "vllm"}))
    assert other.metrics.text().startswith(b"# HELP vllm:")


def test_the_phases_of_a_request_add_up(server: Running) -> None:
    def values() -> dict[str, float]:
        found = {metric.name: metric.samples for metric in server.server.metrics.registry.collect()}
        names = [f"request_{name}_time_seconds" for name in ("queue", "prefill", "decode", "inference")]
        names += ["request_prompt_tokens", "request_generation_tokens", "e2e_request_latency_seconds"]
        kinds = ("_sum", "_count")
        return {
            name + kind: next(one.value for one in found[f"d2sd_{name}"] if one.name.endswith(kind))
            for name in names
            for kind in kinds
        }

    before = values()
    body = {"prompt": [[5, 7, 9], [31]], "max_tokens": 8, "ignore_eos": True}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    gained = {name: value - before[name] for name, value in values().items()}
    assert {value for name, value in gained.items() if name.endswith("_count")} == {2}
    assert (gained["request_prompt_tokens_sum"], gained["request_generation_tokens_sum"]) == (4, 16)
    seconds = {name.split("_")[1]: value for name, value in gained.items() if name.endswith("_time_seconds_sum")}
    assert all(value >= 0 for value in seconds.values())
    assert seconds["prefill"] + seconds["decode"] == pytest.approx(seconds["inference"])
    assert seconds["queue"] + seconds["inference"] <= gained["e2e_request_latency_seconds_sum"] + 1e-6
