"""Pods and images: probes and health checks ask routes that exist; images have extras that exist."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from unittest.mock import MagicMock

import pytest

from d2sd.serve.openai.app import create_app
from d2sd.serve.openai.middleware import _OPEN_PATHS
from d2sd.serve.openai.settings import ServerSettings
from tests.deploy.files import DEPLOY, container, instructions, one, templates

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
