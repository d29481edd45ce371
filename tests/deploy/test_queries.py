"""PromQL of the dashboard, the rules and the autoscalers: it parses, and uses metrics and labels that are exported."""

from __future__ import annotations

import re
from typing import Any, get_args

import promql_parser
import pytest

from d2sd.runtime.sequence import FinishReason
from tests.deploy.files import SERVERS, one, queries, rules, scalers
from tests.deploy.promql import EXPORTED, RECORDED, TARGET, kept, nodes, selectors


def test_metrics_of_the_server_are_collected() -> None:
    assert EXPORTED["d2sd_num_requests_waiting"] == ("gauge", {"model_name"})
    assert EXPORTED["d2sd_request_success_total"] == ("counter", {"model_name", "finished_reason"})
    assert EXPORTED["d2sd_accepted_length_bucket"] == ("histogram", {"model_name", "le"})


@pytest.mark.parametrize("expression", queries().values(), ids=queries())
def test_queries_use_what_is_exported(expression: str) -> None:
    found = selectors(expression)
    assert found
    for selector in found:
        if selector.name.startswith("dynamo_"):  # tests/deploy/test_dynamo.py
            continue
        _, labels = (EXPORTED | RECORDED)[selector.name]
        given = {matcher.name for matcher in selector.matchers.matchers}
        assert given | kept(expression) <= labels | TARGET, selector.name
        for matcher in selector.matchers.matchers:
            if matcher.name == "finished_reason":
                assert matcher.value in get_args(FinishReason)


@pytest.mark.parametrize("expression", queries().values(), ids=queries())
def test_rates_are_of_counters_and_means_of_gauges(expression: str) -> None:
    for call in nodes(expression):
        if isinstance(call, promql_parser.Call) and call.func.name in ("rate", "increase", "avg_over_time"):
            (argument,) = call.args
            name = (
                argument.vector_selector.name
                if isinstance(argument, promql_parser.MatrixSelector)
                else argument.expr.name
            )
            counts = bool(re.search("_(total|bucket|sum|count)$", name))
            assert counts == (call.func.name != "avg_over_time"), name


@pytest.mark.parametrize("path", SERVERS)
def test_autoscalers_ask_for_one_number_of_their_own_pods(path: str) -> None:
    for _, data in scalers(path):
        for selector in selectors(data["query"]):
            (matcher,) = selector.matchers.matchers
            own = ("dynamo_component", "d2sd") if path == "dynamo.yaml" else ("job", f"d2sd-{path[:-5]}")
            assert (matcher.name, matcher.value) == own
        assert not kept(data["query"])
        assert data["ignoreNullValues"] == "false"  # no data is an error, on which the fallback acts, and not zero load
    if path != "dynamo.yaml":
        monitor = one(path, "PodMonitor")["spec"]
        assert monitor["jobLabel"] in monitor["selector"]["matchLabels"]
        assert monitor["selector"]["matchLabels"][monitor["jobLabel"]] == f"d2sd-{path[:-5]}"


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [rule for rule in rules() if "alert" in rule], ids=lambda rule: rule["alert"])
def test_alarms_say_what_and_where(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert rule["for"]
    labels = kept(rule["expr"]).union(*(RECORDED[s.name][1] for s in selectors(rule["expr"]) if s.name in RECORDED))
    used = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
    assert set(used) <= labels


def test_there_is_an_alarm_for_each_trouble() -> None:
    watched = {selector.name for rule in rules() if "alert" in rule for selector in selectors(rule["expr"])}
    assert watched >= {
        "d2sd:accepted_length:mean10m", "d2sd_num_requests_waiting", "d2sd_kv_cache_usage_perc",
        "d2sd_request_success_total", "d2sd_time_to_first_token_seconds_bucket",
    }  # fmt: skip
    (record,) = (rule["expr"] for rule in rules() if "record" in rule)
    # steps of plain decoding are in neither: `auto` under load is not a fall of acceptance
    assert {selector.name for selector in selectors(record)} == {
        "d2sd_spec_decode_num_accepted_tokens_total", "d2sd_spec_decode_num_drafts_total",
    }  # fmt: skip
