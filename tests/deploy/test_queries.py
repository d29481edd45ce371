"""PromQL of the dashboard, the rules and the autoscalers: it parses, and uses metrics and labels that are exported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args
from unittest.mock import MagicMock

import promql_parser as promql
import pytest
from pydantic import BaseModel, ConfigDict, Field

from d2sd.runtime.sequence import FinishReason
from d2sd.runtime.stats import EngineStats
from d2sd.serve.openai.metrics import Metrics
from tests.deploy.files import SERVERS, dashboard, one, queries, rules, scalers

#: Labels that Prometheus adds to what it scrapes from a pod, and those of Dynamo's runtime.
TARGET = {"namespace", "pod", "container", "job", "instance", "dynamo_namespace", "dynamo_component"}


def exported() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of every series that a server exports, by name."""
    stats = EngineStats(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, "chain")
    metrics = Metrics(MagicMock(stats=stats), "m")
    metrics.ended(None, "stop")
    metrics.refresh()
    return {
        sample.name: (family.type, {*sample.labels})
        for family in metrics.registry.collect()
        for sample in family.samples
    }


EXPORTED = exported()
#: Recording rules, with the labels that their expressions keep.
RECORDED = {rule["record"]: ("gauge", {"model_name"}) for rule in rules() if "record" in rule}


def nodes(expression: str) -> list[Any]:
    """Every node of a parsed expression. Raises ValueError with the place of an error."""
    found: list[Any] = []
    promql.walk(promql.parse(expression), lambda node: found.append(node))
    return found


def selectors(expression: str) -> list[Any]:
    return [node for node in nodes(expression) if isinstance(node, promql.VectorSelector)]


def kept(expression: str) -> set[str]:
    """Labels that aggregations keep."""
    modifiers = [node.modifier for node in nodes(expression) if isinstance(node, promql.AggregateExpr)]
    return {label for modifier in modifiers if modifier is not None for label in modifier.labels}


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
        if isinstance(call, promql.Call) and call.func.name in ("rate", "increase", "avg_over_time"):
            (argument,) = call.args
            name = argument.vector_selector.name if isinstance(argument, promql.MatrixSelector) else argument.expr.name
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


# -- the dashboard -----------------------------------------------------------------------------------------------------


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Source(Strict):
    type: Literal["prometheus"]
    uid: Literal["${datasource}"]


class Position(Strict):
    x: Annotated[int, Field(ge=0, le=23)]
    y: Annotated[int, Field(ge=0)]
    w: Annotated[int, Field(ge=4, le=24)]
    h: Annotated[int, Field(ge=4)]


class Target(Strict):
    refId: Annotated[str, Field(pattern="^[A-Z]$")]
    legendFormat: Annotated[str, Field(min_length=1)]
    expr: str
    format: Literal["heatmap", "time_series"] = "time_series"


class Defaults(Strict):
    unit: Literal["short", "s", "percentunit", "reqps"]
    min: float | None = None
    max: float | None = None


class Fields(Strict):
    defaults: Defaults
    overrides: list[Any]


class Panel(Strict):
    id: int
    type: Literal["timeseries", "heatmap"]
    title: str
    description: Annotated[str, Field(min_length=10)]
    gridPos: Position
    datasource: Source
    fieldConfig: Fields
    options: dict[str, Any] = {}
    targets: Annotated[list[Target], Field(min_length=1)]


class Variable(Strict):
    name: str
    type: Literal["datasource", "query"]
    label: str
    query: str
    datasource: Source | None = None
    includeAll: bool = False
    multi: bool = False
    allValue: str | None = None
    refresh: int = 0


class Variables(Strict):
    list: list[Variable]


class Span(Strict):
    model_config = ConfigDict(populate_by_name=True)
    begin: str = Field(alias="from")
    to: str


class Dashboard(Strict):
    """What Grafana's model has of these fields."""

    uid: str
    title: str
    tags: list[str]
    schemaVersion: Annotated[int, Field(ge=39)]
    editable: bool
    refresh: str
    time: Span
    templating: Variables
    panels: list[Panel]


def cells(position: Position) -> Iterator[tuple[int, int]]:
    for x in range(position.x, position.x + position.w):
        for y in range(position.y, position.y + position.h):
            yield x, y


def test_the_dashboard_is_one_of_grafana() -> None:
    made = Dashboard.model_validate(dashboard())
    assert len({panel.id for panel in made.panels}) == len(made.panels)
    taken = [cell for panel in made.panels for cell in cells(panel.gridPos)]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) <= 23
    names = {variable.name for variable in made.templating.list}
    for panel in made.panels:
        assert [target.refId for target in panel.targets] == [chr(65 + i) for i in range(len(panel.targets))]
        for target in panel.targets:
            assert set(re.findall(r"\$\{?(\w+)", target.expr)) <= names | {"__rate_interval"}
            labels = set(re.findall(r"\{\{(\w+)\}\}", target.legendFormat))
            assert labels <= kept(target.expr.replace("$__rate_interval", "5m").replace("$model", ".*"))
    (metric, label) = re.findall(r"label_values\((\w+), (\w+)\)", made.templating.list[1].query)[0]
    assert label in EXPORTED[metric][1]
