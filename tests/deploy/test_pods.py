"""Pods and images: probes ask routes that exist, nothing runs as root, nothing is unpinned, bundles are read-only."""

from __future__ import annotations

import re
from importlib.metadata import metadata, version
from unittest.mock import MagicMock

import pytest

from d2sd.serve.openai.app import create_app
from d2sd.serve.openai.middleware import _OPEN_PATHS
from d2sd.serve.openai.settings import ServerSettings
from tests.deploy.files import DEPLOY, MANIFESTS, SERVERS, container, documents, instructions, one, templates

#: Of the KServe protocol, asked from a real server by tests/d2sd/serve/triton/test_live.py.
TRITON = {"/v2/health/live", "/v2/health/ready"}
#: Of Dynamo's system server, asked from a real worker by tests/d2sd/serve/dynamo/test_live.py.
DYNAMO = {"/health"}


@pytest.fixture(scope="module")
def routes() -> set[str]:
    """The routes of `d2sd serve`."""
    app = create_app(MagicMock(), MagicMock(), ServerSettings(model="m"))
    return {getattr(route, "path", "") for route in app.routes}


def all_pods() -> dict[str, tuple[str, str]]:
    return {f"{path}:{name}": (path, name) for path in MANIFESTS for name in templates(path)}


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


@pytest.mark.parametrize(("path", "name"), all_pods().values(), ids=all_pods())
def test_pods_are_confined(path: str, name: str) -> None:
    template = templates(path)[name]
    made, pod = container(template), template["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert made["securityContext"]["allowPrivilegeEscalation"] is False
    assert made["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert re.search(r":[\w.]*\d[\w.-]*$", made["image"]), "no version"
    assert "latest" not in made["image"]
    assert made["resources"]["limits"]["memory"]
    if path == "bundle.yaml":  # it fills the volume
        return
    assert made["securityContext"]["readOnlyRootFilesystem"] is True
    claims = {volume["name"]: volume["persistentVolumeClaim"] for volume in pod["volumes"] if len(volume) == 2
              and "persistentVolumeClaim" in volume}  # fmt: skip
    assert [claim["claimName"] for claim in claims.values()] == [
        one("bundle.yaml", "PersistentVolumeClaim")["metadata"]["name"]
    ]
    assert all(claim["readOnly"] for claim in claims.values())
    mounts = {mount["name"]: mount for mount in made["volumeMounts"]}
    assert all(mounts[claim]["readOnly"] for claim in claims)
    assert "/tmp" in {mount["mountPath"] for mount in mounts.values()}
    limits = made["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == (None if name == "Frontend" else "1")


@pytest.mark.parametrize("path", SERVERS)
def test_pods_may_be_evicted_one_at_a_time(path: str) -> None:
    budgets = [document["spec"] for document in documents(path) if document["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == len(templates(path))
    assert all(budget["maxUnavailable"] == 1 for budget in budgets)


def test_the_image_is_pinned_unprivileged_and_of_known_extras() -> None:
    found = instructions()
    arguments = dict(one.text.split("=", 1) for one in found if one.name == "ARG")
    assert re.fullmatch(r"nvcr\.io/nvidia/[\w/-]+:\d[\w.-]+", arguments["BASE"])
    header = (DEPLOY / "Dockerfile").read_text("utf-8")
    used = {*arguments["EXTRAS"].split(","), *re.findall(r"--build-arg EXTRAS=([\w,]+)", header)[0].split(",")}
    assert used <= set(metadata("d2sd").get_all("Provides-Extra") or ())
    assert {"serve", "structured", "triton", "dynamo"} <= used
    images = {container(template)["image"] for path in MANIFESTS for template in templates(path).values()}
    for tag in re.findall(r"d2sd:([\d.]+)-", f"{header} {images}"):
        assert tag == version("d2sd")
    users = [one.text for one in found if one.name == "USER"]
    assert users[-1] == "10001:10001"
    assert not [one for one in found if one.name == "ADD"]
    assert found[-1].stage == "dynamo"
    assert {one.text.split()[0] for one in found if one.name == "FROM"} == {"${BASE}", "d2sd"}


def test_there_are_no_secrets() -> None:
    """Keys and tokens come from Secrets of the cluster, which these files do not hold."""
    found = [document for path in MANIFESTS for document in documents(path)]
    assert "Secret" not in {document["kind"] for document in found}
    literals = {entry["name"] for path in MANIFESTS for template in templates(path).values()
                for entry in container(template).get("env", ()) if "value" in entry}  # fmt: skip
    literals |= {one.text.split("=")[0] for one in instructions() if one.name in ("ARG", "ENV")}
    assert not [name for name in literals if re.search("KEY|TOKEN|SECRET|PASSWORD", name.upper())]
