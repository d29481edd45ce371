"""An artifact that is damaged, or made to do harm, and a registry that fails: a message, and nothing at the output."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from d2sd.bundle.registry.pull import pull
from d2sd.bundle.registry.push import push
from d2sd.cli.main import main
from d2sd.errors import D2SDError
from tests.d2sd.bundle.registry.fake import Registry, digest_of, running

TITLE = "org.opencontainers.image.title"
WEIGHTS = "target/model.safetensors"
#: A file that no test writes.
EVIL = f"{tempfile.gettempdir()}/evil-{os.getpid()}"
Change = Callable[[Registry], object]


def layer(registry: Registry, name: str = WEIGHTS) -> dict[str, Any]:
    layers = json.loads(registry.manifests["1"])["layers"]
    return next(one for one in layers if one["annotations"][TITLE] == name)


def blob(change: Callable[[bytes], bytes]) -> Change:
    """The registry has other bytes under the weights' digest."""

    def edit(registry: Registry) -> None:
        digest = layer(registry)["digest"]
        registry.blobs[digest] = change(registry.blobs[digest])

    return edit


def resized(more: int) -> Change:
    """The artifact declares another size."""

    def edit(values: dict[str, Any]) -> None:
        for one in values["layers"]:
            one["size"] += more * (one["annotations"][TITLE] == WEIGHTS)

    return lambda registry: registry.edit(edit)


def renamed(name: str) -> Change:
    """The weights have another name, in the artifact and in the bundle's manifest alike."""

    def edit(registry: Registry) -> None:
        def in_artifact(values: dict[str, Any]) -> None:
            (one,) = (one for one in values["layers"] if one["annotations"][TITLE] == WEIGHTS)
            one["annotations"][TITLE] = name

        registry.edit(in_artifact)
        registry.edit_bundle(lambda values: values["files"].update({name: values["files"].pop(WEIGHTS)}))

    return edit


def only_titled(name: str) -> Change:
    """The weights have another name in the artifact alone."""

    def edit(values: dict[str, Any]) -> None:
        values["layers"][-1]["annotations"] = {TITLE: name} if name else {}

    return lambda registry: registry.edit(edit)


def edited(**changes: Any) -> Change:
    return lambda registry: registry.edit(lambda values: values | changes)


def without(name: str) -> Change:
    return lambda registry: registry.edit(
        lambda values: values | {"layers": [one for one in values["layers"] if one["annotations"][TITLE] != name]}
    )


def stored(data: bytes) -> Change:
    return lambda registry: registry.manifests.update({"1": data})


def status(code: int, what: str = "GET manifests/1") -> Change:
    return lambda registry: registry.statuses.update({what: [code] * 5})


FAULTS: dict[str, tuple[Change, str]] = {
    "blob truncated": (blob(lambda data: data[:-7]), "does not have the size"),
    "blob longer": (blob(lambda data: data + b"x"), "does not have the size"),
    "blob of other bytes": (blob(lambda data: b"x" + data[1:]), "wrong hash"),
    "blob missing": (lambda r: r.blobs.pop(layer(r)["digest"]), "does not have it"),
    "size declared smaller": (resized(-1), "does not have the size"),
    "size declared larger": (resized(1), "does not have the size"),
    "size declared negative": (resized(-(1 << 40)), "damaged"),
    "file not listed": (lambda r: r.edit_bundle(lambda values: values["files"].pop(WEIGHTS)), "not those of"),
    "file listed and not sent": (without(WEIGHTS), "not those of"),
    "file of another hash": (
        lambda r: r.edit_bundle(lambda values: values["files"].update({WEIGHTS: "0" * 64})), "not those of",
    ),
    "manifest.json not sent": (without("manifest.json"), "no manifest.json"),
    "manifest.json of another schema": (
        lambda r: r.edit_bundle(lambda values: values.update(d2sd_bundle=99)), "schema version",
    ),
    "manifest.json lists itself": (
        lambda r: r.edit_bundle(lambda values: values["files"].update({"manifest.json": "0" * 64})), "not those of",
    ),
    "name absolute": (renamed(EVIL), "leaves the bundle"),
    "name with ..": (renamed("target/../../evil"), "leaves the bundle"),
    "name with NUL": (renamed("target/a\0b"), "leaves the bundle"),
    "name with a backslash": (renamed("..\\evil"), "leaves the bundle"),
    "name of a file that is a folder": (renamed("target/config.json/x"), "a file and a folder"),
    "name too long": (renamed("x" * 300), "File name too long"),
    "title absolute": (only_titled(EVIL), "not those of"),
    "title with ..": (only_titled("../evil"), "not those of"),
    "title of another file": (only_titled("target/config.json"), "one name"),
    "title missing": (only_titled(""), "no name"),
    "another kind of artifact": (edited(artifactType="application/vnd.oci.image.config.v1+json"), "not a bundle"),
    "an index": (edited(mediaType="application/vnd.oci.image.index.v1+json"), "damaged"),
    "digest of another kind": (edited(config={"mediaType": "a/b", "digest": "md5:0", "size": 0}), "damaged"),
    "no JSON": (stored(b"\xff{"), "damaged"),
    "JSON of another kind": (stored(b"[]"), "not a bundle"),
    "deep JSON": (stored(b"[" * 100_000), "damaged"),
    "no artifact": (lambda r: r.manifests.pop("1"), "does not have it"),
    "404": (status(404), "does not have it"),
    "401 without a challenge": (status(401), "asks for credentials"),
    "a challenge that cannot be read": (lambda r: setattr(r, "auth", "Bearer realm"), "asks for credentials"),
    "a challenge without an address": (lambda r: setattr(r, "auth", "Bearer realm=x"), "without TLS"),
    "a challenge to another host": (lambda r: setattr(r, "auth", 'Bearer realm="http://h.example/"'), "without TLS"),
    "a challenge to nowhere": (lambda r: setattr(r, "auth", 'Bearer realm="https://[::1"'), "cannot be used"),
    "403": (status(403), "asks for credentials"),
    "418": (status(418), "refuses the request"),
    "500": (status(500), "refuses the request"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_message_and_leaves_nothing(fault: str, registry: Registry, tmp_path: Path) -> None:
    change, told = FAULTS[fault]
    change(registry)
    out = tmp_path / "work" / "out"
    ended = CliRunner().invoke(main, ["pull", registry.reference(), "--out", str(out)])
    assert ended.exit_code == 2, ended.output
    assert ended.stderr.startswith("error: ")
    assert told in ended.stderr, ended.stderr
    assert "\x1b" not in ended.stderr
    assert not out.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"work"}
    assert not Path(EVIL).exists()
    assert not list(tmp_path.rglob("evil"))


def test_a_file_that_arrived_wrong_is_fetched_anew(registry: Registry, tmp_path: Path) -> None:
    digest = layer(registry)["digest"]
    right = registry.blobs[digest]
    for wrong in (b"x" + right[1:], b"x" + right[1:-7], b"x" + right):
        out = tmp_path / str(len(wrong))
        registry.blobs[digest] = wrong
        with pytest.raises(D2SDError):
            pull(registry.reference(), out)
        registry.blobs[digest] = right
        pull(registry.reference(), out)


def test_what_another_artifact_left_is_dropped(registry: Registry, tmp_path: Path) -> None:
    work = tmp_path / ".out.pulling"
    for name in ("bundle/target/evil.py", "partial/0", "bundle/target/config.json"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("stale")
    (work / "bundle" / "link").symlink_to("/etc")
    pull(registry.reference(), tmp_path / "out")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name in ("evil.py", "link")]


def test_a_pinned_digest_is_checked(registry: Registry, tmp_path: Path) -> None:
    digest = digest_of(registry.manifests["1"])
    registry.manifests[digest] += b" "
    with pytest.raises(D2SDError, match="sent another artifact"):
        pull(registry.reference(f"@{digest}"), tmp_path / "out")


def test_a_manifest_is_read_within_bounds(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2sd.bundle.registry.client.MAX_MANIFEST", 100)
    with pytest.raises(D2SDError, match="too large"):
        pull(registry.reference(), tmp_path / "out")


def test_a_storage_host_gets_no_credentials(
    registry: Registry, stored: Registry, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("D2SD_REGISTRY_USERNAME", "anna")
    monkeypatch.setenv("D2SD_REGISTRY_PASSWORD", "s3cret:word")
    registry.auth = "Bearer"
    with running(Registry(blobs=dict(stored.blobs))) as storage:
        registry.redirect = storage.url
        pull(registry.reference(), tmp_path / "out")
        storage.blobs.clear()
        push(bundle, registry.reference(":2"))
        assert {header for _, header in storage.authorizations} == {""}
        assert {line.partition(" ")[0] for line in storage.sent()} == {"GET", "PUT"}


def test_a_redirect_to_another_host_without_tls_is_refused(registry: Registry, tmp_path: Path) -> None:
    registry.redirect = "http://storage.example"
    with pytest.raises(D2SDError, match=r"without TLS(.|\n)*storage.example(.|\n)*--plain-http"):
        pull(registry.reference(), tmp_path / "out")
