"""A tiny bundle that was pushed once, and registries that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from d2sd.convert.build import build
from d2sd.convert.bundle.registry import client, credentials
from d2sd.convert.bundle.registry.push import push
from d2sd.recipe import load_recipe
from tests.convert.bundle.registry.fake import Registry, running
from tests.convert.helpers import write_project


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials of this machine, and no waiting."""
    for name in (credentials.USERNAME, credentials.PASSWORD):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(client, "PAUSES", (0.0, 0.0))


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("travel")
    build(load_recipe(write_project(folder / "project")), folder / "bundle", validate=False)
    return folder / "bundle"


@pytest.fixture(scope="session")
def stored(bundle: Path) -> Registry:
    with running(Registry()) as registry:
        push(bundle, registry.reference())
    return registry


@pytest.fixture
def registry(stored: Registry) -> Iterator[Registry]:
    """A registry with the bundle under tag 1."""
    copy = replace(stored, blobs=dict(stored.blobs), manifests=dict(stored.manifests), log=[], authorizations=[])
    with running(copy) as served:
        yield served


@pytest.fixture
def empty() -> Iterator[Registry]:
    with running(Registry()) as served:
        yield served
