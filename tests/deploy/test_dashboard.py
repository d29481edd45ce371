"""The dashboard has Grafana's fields, panels side by side, and legends with labels that its queries keep."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tests.deploy.files import dashboard, queries
from tests.deploy.promql import EXPORTED, kept


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
            assert labels <= kept(queries()[f"panel {panel.title} {target.refId}"])
    (metric, label) = re.findall(r"label_values\((\w+), (\w+)\)", made.templating.list[1].query)[0]
    assert label in EXPORTED[metric][1]
