"""Parsed PromQL, and the series that a server of d2sd exports."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import promql_parser

from d2sd.runtime.stats import EngineStats
from d2sd.serve.openai.metrics import Metrics
from tests.deploy.files import rules

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
    promql_parser.walk(promql_parser.parse(expression), lambda node: found.append(node))
    return found


def selectors(expression: str) -> list[Any]:
    return [node for node in nodes(expression) if isinstance(node, promql_parser.VectorSelector)]


def kept(expression: str) -> set[str]:
    """Labels that aggregations keep."""
    modifiers = [node.modifier for node in nodes(expression) if isinstance(node, promql_parser.AggregateExpr)]
    return {label for modifier in modifiers if modifier is not None for label in modifier.labels}
