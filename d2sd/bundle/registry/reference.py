"""The address of an artifact: HOST[:PORT]/NAME[:TAG][@sha256:DIGEST], as `docker` and `oras` write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from d2sd.errors import RegistryError

#: Tag of a reference that has neither tag nor digest.
DEFAULT_TAG = "latest"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::[0-9]{1,5})?"
#: The grammar of the OCI distribution specification, with an explicit host.
_REFERENCE = re.compile(
    rf"(?P<host>{_HOST})/(?P<name>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_MAX_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Reference:
    """The parts of a reference."""

    host: str  # with the port, if it has one
    name: str  # the repository
    tag: str
    digest: str | None  # sha256:...; where both are given, the digest decides

    def pinned(self, digest: str) -> str:
        """The reference of one content of this repository."""
        return f"{self.host}/{self.name}@{digest}"

    def __str__(self) -> str:
        return self.pinned(self.digest) if self.digest else f"{self.host}/{self.name}:{self.tag}"


def parse_reference(text: str) -> Reference:
    """Parse a reference. Raises `RegistryError`; there is no default registry, so the host has to be written."""
    found = _REFERENCE.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if found is None or not (found["host"] == "localhost" or re.search(r"[.:]", found["host"])):
        # a reference with a password in it is not repeated
        shown = "user information before the host" if "@" in text.partition("/")[0] else text
        raise RegistryError(
            "This is not a reference to a registry.", where="REFERENCE", found=shown,
            expected="HOST[:PORT]/NAME[:TAG] or HOST[:PORT]/NAME@sha256:...",
        )  # fmt: skip
    return Reference(found["host"], found["name"], found["tag"] or DEFAULT_TAG, found["digest"])


def is_loopback(host: str) -> bool:
    """Whether HOST[:PORT] is this machine."""
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    if name == "localhost":
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
