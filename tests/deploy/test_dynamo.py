"""The graph of deploy/dynamo.yaml against Dynamo's packages: `make dynamo-test`."""

from __future__ import annotations

import argparse
import mmap
import re
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.deploy.files import commands, container, environment, instructions, one, queries, templates

#: What a histogram exports.
SUFFIXES = ("", "_bucket", "_sum", "_count")


def graph() -> dict[str, Any]:
    return one("dynamo.yaml", "DynamoGraphDeployment")


def test_the_operator_is_given_the_version_in_the_image() -> None:
    found = [Requirement(line) for line in requires("d2sd") or () if line.startswith("ai-dynamo")]
    (required,) = found
    for component in graph()["spec"]["components"]:
        assert required.specifier.contains(component["runtimeVersionOverride"])


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
