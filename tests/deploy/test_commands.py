"""The containers' commands: every program, option and value exists, and agrees with the rest of its manifest."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest

from d2sd.cli.main import main as cli
from d2sd.recipe import load_recipe
from d2sd.serve.dynamo import engine as dynamo_engine
from d2sd.serve.openai import run as openai_run
from d2sd.serve.triton import run as triton_run
from d2sd.serve.triton.parameters import Parameters
from tests.deploy.files import SERVERS, commands, container, environment, one, scalers, templates

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda` is accepted on a machine without a GPU."""
    monkeypatch.setattr("d2sd.cli.options.check_device", lambda device: None)


def parsed(program: list[str]) -> dict[str, Any]:
    """The parameters of a command of d2sd. Raises click.UsageError for what does not exist."""
    name, command, rest = cli.resolve_command(click.Context(cli), program[1:])
    assert command is not None
    return dict(command.make_context(name, list(rest)).params)


def options(program: list[str]) -> dict[str, str]:
    """`--name=value` of a program that is not ours."""
    return dict(word[2:].split("=", 1) for word in program if word.startswith("--") and "=" in word)


def ours(path: str) -> dict[str, Any]:
    """Parameters of the d2sd command of a manifest; those of Triton's model are its settings."""
    (program,) = (p for where, ps in commands().items() if where.startswith(path) for p in ps if p[0] == "d2sd")
    found = parsed(program)
    return found | (Parameters.parse(["bundle=/b", *found["values"]]).model_dump() if "values" in found else {})


def started(path: str, module: str) -> list[str]:
    """The program of a manifest that runs a module."""
    (program,) = (p for where, ps in commands().items() if where.startswith(path) for p in ps if module in p)
    return program


@pytest.mark.parametrize(("where", "programs"), commands().items(), ids=commands())
def test_programs_and_their_options_exist(where: str, programs: list[list[str]]) -> None:
    for program in programs:
        if program[0] == "d2sd":
            found = parsed(program)
            assert found.get("device", "cuda") == "cuda"
            assert found.get("gpus", (0,)) == (0,)  # the pod's only GPU
            if "values" in found:
                Parameters.parse(["bundle=/b", *found["values"]])
        elif program[:2] == ["python", "-m"]:
            module = program[2]
            assert module == "dynamo.frontend" or find_spec(module), module  # Dynamo's: test_dynamo.py
        else:
            assert program == ["sleep", "7200"]


def test_triton_starts_the_repository_that_was_written() -> None:
    for where in ("Dockerfile:triton", "triton.yaml:d2sd-triton"):
        write, run = commands()[where]
        assert run[3] == str(parsed(write)["out"])


def test_servers_listen_where_pods_are_reached() -> None:
    ports = {path: {port["name"]: port["containerPort"] for port in container(template)["ports"]}
             for path in ("serve.yaml", "triton.yaml") for template in templates(path).values()}  # fmt: skip
    assert ours("serve.yaml")["host"] == "0.0.0.0"
    assert {*ports["serve.yaml"].values()} == {ours("serve.yaml")["port"]}
    assert ports["triton.yaml"] == {"http": 8000, "grpc": 8001, "metrics": 8002}  # tritonserver's own
    given = options(started("triton.yaml", "d2sd.serve.triton.run"))
    assert not {"http-port", "grpc-port", "metrics-port"} & given.keys()


def drain(path: str) -> float:
    """Seconds from SIGTERM to the end of a pod's process, at most, and those before it."""
    settings = ours(path)
    if path == "dynamo.yaml":
        values = environment(container(templates(path)["worker"])["env"])
        grace = float(values["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"])
        return grace + float(settings["drain_timeout"]) + dynamo_engine._FLUSH
    (template,) = templates(path).values()
    before = float(container(template)["lifecycle"]["preStop"]["sleep"]["seconds"])
    if path == "serve.yaml":
        return before + float(settings["drain_timeout"]) + openai_run._FLUSH
    limit = float(options(started(path, "d2sd.serve.triton.run"))["exit-timeout-secs"])
    assert settings["drain_timeout"] < limit == triton_run._EXIT_TIMEOUT
    return before + limit


@pytest.mark.parametrize("path", SERVERS)
def test_a_pod_outlives_its_drain(path: str) -> None:
    for name, template in templates(path).items():
        if name != "Frontend":
            assert template["spec"]["terminationGracePeriodSeconds"] > drain(path)


@pytest.mark.parametrize("path", SERVERS)
def test_the_autoscaler_reacts_before_a_batch_is_full(path: str) -> None:
    settings, triggers = ours(path), dict(scalers(path))
    assert float(triggers["requests"]["threshold"]) < settings["max_batch"] < settings["max_waiting"]


def test_the_values_are_those_of_the_recipe() -> None:
    """The bundle that the manifests name is a shipped recipe's, and its page size is the router's."""
    graph = one("dynamo.yaml", "DynamoGraphDeployment")["spec"]
    bundles = {environment(container(templates(path)[f"d2sd-{path[:-5]}"])["env"])["BUNDLE"] for path in SERVERS[:2]}
    (bundle,) = bundles | {environment(graph["env"])["BUNDLE"]}
    recipe = load_recipe(ROOT / "recipes" / f"{Path(bundle).name}.yaml")
    frontend = options(started("dynamo.yaml", "dynamo.frontend"))
    assert int(frontend["kv-cache-block-size"]) == recipe.limits.page_size
    assert all(ours(path)["max_batch"] == recipe.limits.max_batch for path in SERVERS)
