"""The graph of deploy/dynamo.yaml against Dynamo: `make dynamo-test` against its packages, `make dynamo-schema`."""

from __future__ import annotations

import argparse
import mmap
import os
import re
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.deploy.files import commands, container, environment, instructions, one, queries, templates

#: What a histogram exports.
SUFFIXES = ("", "_bucket", "_sum", "_count")


def graph() -> dict[str, Any]:
    return one("dynamo.yaml", "DynamoGraphDeployment")


def closed(schema: Any) -> Any:
    """The schema with objects that have no other properties than the listed ones, as `kubectl --validate=strict`."""
    if isinstance(schema, list):
        return [closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    listed = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if listed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def test_the_operator_is_given_the_version_in_the_image() -> None:
    found = [Requirement(line) for line in requires("d2sd") or () if line.startswith("ai-dynamo")]
    (required,) = found
    for component in graph()["spec"]["components"]:
        assert required.specifier.contains(component["runtimeVersionOverride"])


def test_the_graph_is_valid() -> None:
    file = os.environ.get("D2SD_DYNAMO_CRD")
    if file is None:
        pytest.skip("needs the operator's schema: make dynamo-schema")
    from jsonschema import Draft7Validator

    definition = yaml.load(Path(file).read_text("utf-8"), Loader=yaml.CSafeLoader)["spec"]
    group, _, name = graph()["apiVersion"].partition("/")
    assert (definition["group"], definition["names"]["kind"]) == (group, graph()["kind"])
    (schema,) = (
        version["schema"]["openAPIV3Schema"]
        for version in definition["versions"]
        if version["name"] == name and version["served"]
    )
    validator = Draft7Validator(closed(schema))
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(graph())] == []
    wrong = graph()
    wrong["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]["imag"] = "x"
    assert [error.validator for error in validator.iter_errors(wrong)] == ["additionalProperties"]


def test_metrics_of_the_frontend_exist() -> None:
    names = pytest.importorskip("dynamo.prometheus_names", reason="needs ai-dynamo: make dynamo-test")
    known = {
        f"{names.name_prefix.FRONTEND}_{value}{suffix}"
        for value in vars(names.frontend_service).values()
        if isinstance(value, str)
        for suffix in SUFFIXES
    }
    used = {name for expression in queries().values() for name in re.findall(r"\bdynamo_\w+(?=\{|\[|$)", expression)}
    assert used
    assert used <= known


def test_options_of_the_frontend_exist() -> None:
    arguments = pytest.importorskip("dynamo.frontend.frontend_args", reason="needs ai-dynamo: make dynamo-test")
    (program,) = commands()["dynamo.yaml:Frontend"]
    assert program[:3] == ["python", "-m", "dynamo.frontend"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    arguments.FrontendArgGroup().add_arguments(parser)
    found = parser.parse_args(program[3:])
    assert (found.migration_limit, found.router_mode, found.kv_cache_block_size) == (3, "kv", 16)


def test_dynamo_reads_the_variables() -> None:
    core = pytest.importorskip("dynamo._core", reason="needs ai-dynamo: make dynamo-test")
    given = environment(graph()["spec"]["env"]) | environment(container(templates("dynamo.yaml")["worker"])["env"])
    given |= {one.text.split("=")[0]: "" for one in instructions() if (one.stage, one.name) == ("dynamo", "ENV")}
    names = [name for name in given if name.startswith("DYN_")]
    assert len(names) == 3
    with Path(core.__file__).open("rb") as library, mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        assert [name for name in names if binary.find(name.encode()) < 0] == []
