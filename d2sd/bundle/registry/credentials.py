"""Credentials of a registry: from the environment, or from Docker's configuration and its credential helpers.

They are never arguments of a command, and no message or `repr` has them.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d2sd.errors import RegistryError
from d2sd.io import parse_json, read_json

USERNAME, PASSWORD = "D2SD_REGISTRY_USERNAME", "D2SD_REGISTRY_PASSWORD"
#: Key of Docker Hub in Docker's configuration.
_HUB = "https://index.docker.io/v1/"
#: User name under which a credential helper returns an identity token.
_TOKEN_USER = "<token>"  # noqa: S105
_HELPER_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Credentials:
    """One of the two."""

    basic: str | None = field(default=None, repr=False)  # base64 of user:password
    identity_token: str | None = field(default=None, repr=False)  # OAuth 2 refresh token

    @classmethod
    def of(cls, username: str, password: str) -> Credentials:
        """The credentials of a user."""
        if username == _TOKEN_USER:
            return cls(identity_token=password)
        return cls(basic=base64.b64encode(f"{username}:{password}".encode()).decode())


def find_credentials(host: str) -> Credentials | None:
    """Credentials for `host` (with its port), or None. Raises `RegistryError` for a damaged configuration."""
    username, password = os.environ.get(USERNAME), os.environ.get(PASSWORD)
    if username and password:
        return Credentials.of(username, password)
    if username or password:
        raise RegistryError(
            "The environment has one half of the credentials.", where=USERNAME if username else PASSWORD,
            fix=f"set {PASSWORD if username else USERNAME} too",
        )  # fmt: skip
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    if not path.is_file():
        return None
    config = _mapping(read_json(path, error=RegistryError, what="Docker configuration"))
    for key in (_HUB,) if host == "docker.io" else (host, f"https://{host}"):
        helper = _mapping(config.get("credHelpers")).get(key) or config.get("credsStore")
        if helper and (found := _ask_helper(str(helper), key, path)) is not None:
            return found
        if entry := _mapping(_mapping(config.get("auths")).get(key)):
            return _of_entry(entry, f"{path}: auths.{key}")
    return None


def _of_entry(entry: Mapping[str, Any], where: str) -> Credentials | None:
    if token := entry.get("identitytoken"):
        return Credentials(identity_token=str(token))
    basic = entry.get("auth")
    if not basic:
        return None  # a helper has them
    try:
        if b":" not in base64.b64decode(str(basic), validate=True):
            raise ValueError
    except (binascii.Error, ValueError):
        raise RegistryError(
            "The Docker configuration is damaged.", where=where, expected="base64 of user:password"
        ) from None
    return Credentials(basic=str(basic))


def _ask_helper(helper: str, key: str, path: Path) -> Credentials | None:
    """Ask `docker-credential-<helper>`; None if it has nothing for `key`."""
    program = f"docker-credential-{helper}"
    if not re.fullmatch(r"[A-Za-z0-9._-]+", helper):
        raise RegistryError(
            "The Docker configuration is damaged.", where=path, expected="the name of a credential helper"
        )
    try:
        done = subprocess.run(
            [program, "get"], input=key, capture_output=True, text=True, check=False, timeout=_HELPER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer in {_HELPER_SECONDS} s"
        raise RegistryError("The credential helper failed.", where=path, found=f"{program}: {reason}") from None
    if done.returncode and "not found" in done.stdout:
        return None
    try:
        values = parse_json(done.stdout)
        return Credentials.of(values["Username"], values["Secret"])
    except (ValueError, KeyError, TypeError):  # what it printed may be a secret
        raise RegistryError(
            "The credential helper failed.", where=path, found=f"{program}: exit status {done.returncode}"
        ) from None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
