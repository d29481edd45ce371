"""Containers: their programs, options, values and routes exist, and agree with the rest of their manifests."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import click
import pytest

from d2sd.cli.main import main as cli
from d2sd.recipe import load_recipe
from d2sd.serve.dynamo import engine as dynamo_engine
from d2sd.serve.openai import run as openai_run
from d2sd.serve.openai.app import create_app
from d2sd.serve.openai.middleware import _OPEN_PATHS
from d2sd.serve.openai.settings import ServerSettings
from d2sd.serve.triton import run as triton_run
from d2sd.serve.triton.parameters import Parameters
from tests.deploy.files import DEPLOY, SERVERS, commands, container, environment, instructions, one, scalers, templates

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
    ports = {
        path: {port["name"]: port["containerPort"] for port in container(template)["ports"]}
        for path in ("serve.yaml", "triton.yaml")
        for template in templates(path).values()
    }
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


#: Of the KServe protocol, asked from a real server by tests/d2sd/serve/triton/test_live.py.
TRITON = {"/v2/health/live", "/v2/health/ready"}
#: Of Dynamo's system server, asked from a real worker by tests/d2sd/serve/dynamo/test_live.py.
DYNAMO = {"/health"}


@pytest.fixture(scope="module")
def routes() -> set[str]:
    """The routes of `d2sd serve`."""
    app = create_app(MagicMock(), MagicMock(), ServerSettings(model="m"))
    return {getattr(route, "path", "") for route in app.routes}


@pytest.mark.parametrize("path", ["serve.yaml", "triton.yaml"])
def test_probes_ask_routes_and_ports_that_exist(path: str, routes: set[str]) -> None:
    (template,) = templates(path).values()
    made = container(template)
    ports = {port["name"] for port in made["ports"]}
    known = TRITON if path == "triton.yaml" else routes & _OPEN_PATHS  # without an API key
    probes = {name: made[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    for probe in probes.values():
        assert probe["path"] in known
        assert probe["port"] in ports
    # a server that is loading or draining is not ready, and must not be killed for it
    assert "ready" in probes["readiness"]["path"]
    assert "ready" not in probes["liveness"]["path"]
    service = one(path, "Service")["spec"]
    assert {port["targetPort"] for port in service["ports"]} <= ports
    (scrape,) = one(path, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scrape["port"] in ports
    assert scrape["path"] in {"/metrics"} & routes


def test_health_checks_of_the_images_ask_routes_that_exist(routes: set[str]) -> None:
    known = {"serve": (8000, routes & _OPEN_PATHS), "triton": (8000, TRITON), "dynamo": (9090, DYNAMO)}
    checks = {one.stage: one.text for one in instructions() if one.name == "HEALTHCHECK"}
    exposed = {one.stage: one.text.split() for one in instructions() if one.name == "EXPOSE"}
    assert checks.keys() == known.keys()
    for stage, text in checks.items():
        ((port, path),) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/]*)", text)
        assert (int(port), path in known[stage][1]) == (known[stage][0], True)
        assert port in exposed[stage]


def test_the_image_has_extras_that_exist() -> None:
    arguments = dict(one.text.split("=", 1) for one in instructions() if one.name == "ARG")
    header = (DEPLOY / "Dockerfile").read_text("utf-8")
    used = {*arguments["EXTRAS"].split(","), *re.findall(r"--build-arg EXTRAS=([\w,]+)", header)[0].split(",")}
    assert used <= set(metadata("d2sd").get_all("Provides-Extra") or ())
