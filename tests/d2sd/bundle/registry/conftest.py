"""A tiny bundle that was pushed once, and registries that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from d2sd.bundle.registry import connection, credentials
from d2sd.bundle.registry.push import push
from d2sd.io import hash_files, list_files, write_json
from d2sd.manifest import NAME, Manifest, TargetGeometry
from d2sd.recipe import Recipe
from tests.d2sd.bundle.registry.fake import Registry, running


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials of this machine, and no waiting."""
    for name in (credentials.USERNAME, credentials.PASSWORD):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(connection, "PAUSES", (0.0, 0.0))


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle as far as its files go: no model could be loaded from it, and none is."""
    folder = tmp_path_factory.mktemp("travel") / "bundle"
    generator = Random(0)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        for part in ("target", "drafter_first"):
            (folder / part).mkdir(parents=True, exist_ok=True)
            size = 80_000 if name.endswith("safetensors") else 500
            (folder / part / name).write_bytes(generator.randbytes(size))
    manifest = Manifest(
        recipe=Recipe.model_validate({"d2sd": 1, "name": "tiny", "target": {"path": "target"}}),
        target=TargetGeometry(
            family="llama", num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=64,
            parameters=29_920,
        ),
        first=None, second=None, versions={}, checks={}, files=hash_files(folder, list_files(folder)),
    )  # fmt: skip
    write_json(folder / NAME, manifest.model_dump(mode="json"))
    return folder


@pytest.fixture(scope="session")
def stored(bundle: Path) -> Registry:
    with running(Registry()) as registry:
        push(bundle, registry.reference())
    return registry


@pytest.fixture
def registry(stored: Registry) -> Iterator[Registry]:
    """A registry with the bundle under tag 1."""
    copy = Registry(blobs=dict(stored.blobs), manifests=dict(stored.manifests))
    with running(copy) as served:
        yield served


@pytest.fixture
def empty() -> Iterator[Registry]:
    with running(Registry()) as served:
        yield served
