"""Read deploy/ for the tests: documents, containers, commands, queries."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
Document = dict[str, Any]


def documents(path: str) -> list[Document]:
    """The YAML documents of a file of deploy/."""
    return list(yaml.load_all((DEPLOY / path).read_text("utf-8"), Loader=yaml.CSafeLoader))


def one(path: str, kind: str) -> Document:
    """The only document of a kind."""
    (found,) = (document for document in documents(path) if document["kind"] == kind)
    return found


MANIFESTS = sorted(path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*.yaml"))
#: The manifests of a server.
SERVERS = ("serve.yaml", "triton.yaml", "dynamo.yaml")


def templates(path: str) -> dict[str, Document]:
    """The pod templates of a manifest, by the name of their workload or component."""
    found = {}
    for document in documents(path):
        spec = document.get("spec", {})
        if document["kind"] == "Pod":
            found[document["metadata"]["name"]] = document
        elif document["kind"] == "Deployment":
            found[document["metadata"]["name"]] = spec["template"]
        for component in spec.get("components", ()):
            found[component["name"]] = component["podTemplate"]
    return found


def container(template: Document) -> Document:
    """The only container of a pod."""
    (found,) = template["spec"]["containers"]
    return dict(found)


def environment(values: list[Document]) -> dict[str, str]:
    """Names and literal values of environment variables."""
    return {entry["name"]: entry["value"] for entry in values if "value" in entry}


class Instruction(NamedTuple):
    """One instruction of the container file."""

    stage: str
    name: str
    text: str


def instructions() -> list[Instruction]:
    """Read deploy/Dockerfile in order; the stage of what stands before the first FROM is empty."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text("utf-8"), flags=re.M).replace("\\\n", " ")
    found, stage = [], ""
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        stage = rest.split()[-1] if name == "FROM" else stage
        found.append(Instruction(stage, name, " ".join(rest.split())))
    return found


def programs(words: list[str]) -> Iterator[list[str]]:
    """The programs that a container's command starts: without tini, and each one of a shell's."""
    if words[:2] == ["tini", "--"]:
        words = words[2:]
    if words[:2] != ["sh", "-c"]:
        yield words
        return
    for part in words[2].split("&&"):
        program = shlex.split(part)
        yield program[1:] if program[0] == "exec" else program


def commands() -> dict[str, list[list[str]]]:
    """The programs of every container, by where they are named."""
    found = {f"Dockerfile:{step.stage}": json.loads(step.text) for step in instructions() if step.name == "CMD"}
    for path in MANIFESTS:
        for name, template in templates(path).items():
            made = container(template)
            found[f"{path}:{name}"] = [*made.get("command", ()), *made.get("args", ())]
    return {where: list(programs(words)) for where, words in found.items()}


def scalers(path: str) -> Iterator[tuple[str, Document]]:
    """Name and metadata of the triggers of a manifest's ScaledObject."""
    for trigger in one(path, "ScaledObject")["spec"]["triggers"]:
        yield trigger["name"], trigger["metadata"]


def rules() -> list[Document]:
    """All rules of monitoring/rules.yaml."""
    groups = one("monitoring/rules.yaml", "PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Every PromQL expression of deploy/, by where it stands; Grafana's variables have values."""
    found = {f"rule {rule.get('alert') or rule['record']}": rule["expr"] for rule in rules()}
    found |= {f"{path} {name}": data["query"] for path in SERVERS for name, data in scalers(path)}
    for panel in json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text("utf-8"))["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")
            found[f"panel {panel['title']} {target['refId']}"] = expression
    return found
