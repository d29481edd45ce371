"""Credentials come from the environment or from Docker's configuration, and appear nowhere else."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from d2sd.bundle.registry.credentials import PASSWORD, USERNAME, find_credentials
from d2sd.bundle.registry.pull import pull
from d2sd.bundle.registry.push import push
from d2sd.bundle.registry.reference import Reference, is_loopback, parse_reference
from d2sd.cli.main import main
from d2sd.errors import D2SDError, RegistryError
from tests.d2sd.bundle.registry.fake import SECRET, TOKEN, USER, Registry

BASIC = base64.b64encode(f"{USER}:{SECRET}".encode()).decode()


def docker(folder: Path, **config: Any) -> None:
    """Write Docker's configuration where `quiet` has put it."""
    (folder / "docker").mkdir(exist_ok=True)
    (folder / "docker" / "config.json").write_text(json.dumps(config))


def helper(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A credential helper called `test`."""
    path = folder / "bin" / "docker-credential-test"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")


@pytest.mark.parametrize("auth", ["Bearer", "Basic"])
@pytest.mark.parametrize("source", ["environment", "configuration", "helper", "store"])
def test_a_registry_that_asks_gets_them(
    source: str, auth: str, registry: Registry, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.auth = auth
    if source == "environment":
        monkeypatch.setenv(USERNAME, USER)
        monkeypatch.setenv(PASSWORD, SECRET)
    elif source == "configuration":
        docker(tmp_path, auths={registry.host: {"auth": BASIC}, "other.example": {"auth": "eDp5"}})
    else:
        answer = json.dumps({"ServerURL": "x", "Username": USER, "Secret": SECRET})
        helper(tmp_path, monkeypatch, f"read host; test $1 = get && test $host = {registry.host} && echo '{answer}'")
        setting = {"credsStore": "test"} if source == "store" else {"credHelpers": {registry.host: "test"}}
        docker(tmp_path, auths={registry.host: {}}, **setting)
    reference = registry.reference(":2")
    push(bundle, reference)
    pull(reference, tmp_path / "out")
    expected = f"Bearer {TOKEN}" if auth == "Bearer" else f"Basic {BASIC}"
    assert {header for _, header in registry.authorizations} == {"", expected}


def test_an_identity_token_is_exchanged(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.auth = "Bearer"
    docker(tmp_path, auths={registry.host: {"identitytoken": SECRET}})
    pull(registry.reference(), tmp_path / "out")
    helper(tmp_path, monkeypatch, f"echo '{json.dumps({'Username': '<token>', 'Secret': SECRET})}'")
    docker(tmp_path, credsStore="test")
    pull(registry.reference(), tmp_path / "again")


@pytest.mark.parametrize("auth", ["Bearer", "Basic"])
@pytest.mark.parametrize("password", ["", "wr0ng"])
def test_without_them_the_message_says_how(
    auth: str, password: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.auth = auth
    if password:
        monkeypatch.setenv(USERNAME, USER)
        monkeypatch.setenv(PASSWORD, password)
    ended = CliRunner().invoke(main, ["pull", registry.reference(), "-o", str(tmp_path / "out")])
    assert ended.exit_code == 2
    assert ("refuses the credentials" if password else "asks for credentials") in ended.stderr
    assert f"docker login {registry.host}" in ended.stderr
    assert "wr0ng" not in ended.stderr
    assert base64.b64encode(f"{USER}:wr0ng".encode()).decode() not in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"auths": {"h:1": {"auth": "s3cret"}}}, "damaged"),
        ({"auths": {"h:1": {"auth": BASIC + "\n"}}}, "damaged"),
        ({"credsStore": "../../evil"}, "damaged"),
        ({"credsStore": "absent"}, "No such file"),
        ({"credHelpers": {"h:1": "test"}}, "exit status 1"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_an_error_without_secrets(
    config: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker(tmp_path, **config)
    helper(tmp_path, monkeypatch, "echo s3cret; exit 1")
    with pytest.raises(RegistryError, match=text) as raised:
        find_credentials("h:1")
    assert "s3cret" not in str(raised.value)
    assert BASIC not in str(raised.value)


def test_where_there_is_nothing_there_are_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_credentials("h:1") is None
    helper(tmp_path, monkeypatch, "echo credentials not found in native keychain; exit 1")
    configs: list[dict[str, Any]] = [{}, {"auths": []}, {"auths": {"h:2": {"auth": BASIC}}}, {"credsStore": "test"}]
    for config in configs:
        docker(tmp_path, **config)
        assert find_credentials("h:1") is None
    docker(tmp_path, auths={"https://index.docker.io/v1/": {"auth": BASIC}, "https://h:1": {"auth": BASIC}})
    for host in ("docker.io", "h:1"):
        found = find_credentials(host)
        assert found is not None
        assert found.basic == BASIC
        assert BASIC not in repr(found)
    monkeypatch.setenv(PASSWORD, SECRET)
    with pytest.raises(RegistryError, match=USERNAME):
        find_credentials("h:1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ghcr.io/a/b:1.0", Reference("ghcr.io", "a/b", "1.0", None)),
        ("localhost/b", Reference("localhost", "b", "latest", None)),
        ("[::1]:5000/b", Reference("[::1]:5000", "b", "latest", None)),
        (f"h.x:5000/b__c@sha256:{'a' * 64}", Reference("h.x:5000", "b__c", "latest", f"sha256:{'a' * 64}")),
    ],
)
def test_references(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected
    assert parse_reference(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "b", "models/b:1", "h.x/", "h.x/B", "h.x/b:", "h.x/b:-1", "h.x/../b", "h.x/b@sha256:0", "h.x//b"),
        *("https://h.x/b", "h.x/b?x=1", "h.x/b#x", "h.x/b\n", "h.x\\evil/b", f"h.x/{'a' * 600}"),
    ],
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(RegistryError, match="not a reference"):
        parse_reference(text)


def test_a_password_in_a_reference_is_not_repeated() -> None:
    with pytest.raises(D2SDError) as raised:
        parse_reference("anna:s3cret@h.x/b")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.9.0.1:80", True), ("[::1]:80", True), ("[::1]", True), ("127.0.0.1.x.com", False),
     ("localhost.x.com:80", False), ("10.0.0.1", False), ("[::2]:80", False)],
)  # fmt: skip
def test_plain_http_is_for_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(parse_reference(f"{host}/b").host) == expected
