"""PromQL of the dashboard, the rules and the autoscalers: it parses, and uses metrics and labels that are exported."""

from __future__ import annotations

import re
from typing import Any, get_args
from unittest.mock import MagicMock

import promql_parser
import pytest

from d2sd.runtime.sequence import FinishReason
from d2sd.runtime.stats import EngineStats
from d2sd.serve.openai.metrics import Metrics
from tests.deploy.files import queries, rules

#: Labels that Prometheus adds to what it scrapes from a pod, and those of Dynamo's runtime.
TARGET = {"namespace", "pod", "container", "job", "instance", "dynamo_namespace", "dynamo_component"}


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Labels of every series that a server exports or a rule records, by name."""
    metrics = Metrics(MagicMock(stats=EngineStats(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, "chain")), "m")
    metrics.ended(None, "stop")
    metrics.refresh()
    families = metrics.registry.collect()
    found = {sample.name: {*sample.labels} for family in families for sample in family.samples}
    return found | {rule["record"]: {"model_name"} for rule in rules() if "record" in rule}


def nodes(expression: str) -> list[Any]:
    """Every node of a parsed expression. Raises ValueError with the place of an error."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), lambda node: found.append(node))
    return found


@pytest.mark.parametrize("expression", queries().values(), ids=queries())
def test_queries_use_what_is_exported(expression: str, series: dict[str, set[str]]) -> None:
    selectors = [node for node in nodes(expression) if isinstance(node, promql_parser.VectorSelector)]
    assert selectors
    aggregations = [node.modifier for node in nodes(expression) if isinstance(node, promql_parser.AggregateExpr)]
    grouped = {label for modifier in aggregations if modifier is not None for label in modifier.labels}
    for selector in selectors:
        name = str(selector.name)
        if name.startswith("dynamo_"):  # tests/deploy/test_dynamo.py
            continue
        matchers = selector.matchers.matchers
        assert {matcher.name for matcher in matchers} | grouped <= series[name] | TARGET, name
        reasons = [matcher.value for matcher in matchers if matcher.name == "finished_reason"]
        assert {*reasons} <= {*get_args(FinishReason)}


@pytest.mark.parametrize("expression", queries().values(), ids=queries())
def test_rates_are_of_counters_and_means_of_gauges(expression: str) -> None:
    for call in nodes(expression):
        if isinstance(call, promql_parser.Call) and call.func.name in ("rate", "increase", "avg_over_time"):
            (argument,) = call.args
            ranged = isinstance(argument, promql_parser.MatrixSelector)
            name = argument.vector_selector.name if ranged else argument.expr.name
            counts = bool(re.search("_(total|bucket|sum|count)$", str(name)))
            assert counts == (call.func.name != "avg_over_time"), name
