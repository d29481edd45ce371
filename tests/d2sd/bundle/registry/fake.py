"""A registry in a thread: blobs, uploads in one request, manifests and tags of the OCI distribution specification."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN, USER, SECRET = "t0ken", "anna", "s3cret:word"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Registry:
    """What is stored, what was asked, and what goes wrong."""

    blobs: dict[str, bytes] = field(default_factory=dict)  # by digest; a test may store other bytes under one
    manifests: dict[str, bytes] = field(default_factory=dict)  # by tag and digest
    log: list[str] = field(default_factory=list)  # "GET blobs/sha256:..." and the Range, in order
    authorizations: list[tuple[str, str]] = field(default_factory=list)  # path and Authorization header
    url: str = ""
    auth: str = ""  # "Bearer" or "Basic": credentials are required; other text is a challenge nobody can answer
    drops: dict[str, list[int]] = field(default_factory=dict)  # digest -> bytes after which the next answers end
    statuses: dict[str, list[int]] = field(default_factory=dict)  # "PUT manifests/1" -> the next answers
    ranges: bool = True
    redirect: str = ""  # blobs are at this address, those that are sent too

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def reference(self, suffix: str = ":1") -> str:
        return f"{self.host}/models/tiny{suffix}"

    def sent(self) -> list[str]:
        """Requests that carried or asked for contents of blobs."""
        return [line for line in self.log if line.startswith(("GET blobs/", "PUT blobs/"))]

    def edit(self, change: Any) -> None:
        """Replace the artifact of tag 1 by `change(values)` of it."""
        values = json.loads(self.manifests["1"])
        self.manifests["1"] = json.dumps(change(values) or values).encode()

    def edit_bundle(self, change: Any) -> None:
        """Change the bundle's manifest.json in place, and the layer that carries it."""
        artifact = json.loads(self.manifests["1"])
        layer = artifact["layers"][0]
        values = json.loads(self.blobs[layer["digest"]])
        change(values)
        data = json.dumps(values).encode()
        layer |= {"digest": digest_of(data), "size": len(data)}
        self.blobs[layer["digest"]] = data
        self.manifests["1"] = json.dumps(artifact).encode()


@contextmanager
def running(registry: Registry) -> Iterator[Registry]:
    """Serve it on a free port of the loopback device."""

    class Handler(_Handler):
        served = registry

    server = _Server(("127.0.0.1", 0), Handler)
    registry.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is no error: printed, it would end up in the stderr of a command under test."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    served: Registry
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        registry, what = self.served, self._what()
        if what == "token":
            self._token()
        elif not self._allowed(what):
            return
        elif what.startswith("manifests/"):
            self._answer(*self._found(registry.manifests.get(what[10:])))
        elif registry.redirect:
            self._answer(307, headers={"Location": f"{registry.redirect}{self.path}"})
        else:
            self._blob(what.removeprefix("blobs/"))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        what, body = self._what(), self._body()
        if what == "token":
            self._token(body)
        elif self._allowed(what):
            location = f"{self.served.redirect}/v2/models/tiny/blobs/uploads/7?_state=a%3Db"
            self._answer(202, headers={"Location": location})

    def do_PUT(self) -> None:
        registry, what, body = self.served, self._what(), self._body()
        if not self._allowed(what):
            return
        if what.startswith("manifests/"):
            registry.manifests |= {what[10:]: body, digest_of(body): body}
        else:
            query = parse_qs(urlsplit(self.path).query)
            assert query["_state"] == ["a=b"]
            (digest,) = query["digest"]
            if digest != digest_of(body):
                return self._answer(400, b'{"errors": [{"code": "DIGEST_INVALID"}]}')
            registry.blobs[digest] = body
        self._answer(201)

    def _what(self) -> str:
        return urlsplit(self.path).path.removeprefix("/v2/models/tiny/").removeprefix("/")

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _allowed(self, what: str) -> bool:
        registry, authorization = self.served, self.headers.get("Authorization", "")
        part = f" {self.headers['Range']}" if "Range" in self.headers else ""
        registry.log.append(f"{self.command} {what}{part}")
        registry.authorizations.append((what, authorization))
        if statuses := registry.statuses.get(f"{self.command} {what}"):
            self._answer(statuses.pop(0), b'{"errors": [{"code": "X", "message": "because\\u001b[31m"}]}')
            return False
        basic = base64.b64encode(f"{USER}:{SECRET}".encode()).decode()
        bearer = f'Bearer realm="{registry.url}/token",service="s",scope="a:b"'
        accepted = {"": authorization, "Bearer": f"Bearer {TOKEN}", "Basic": f"Basic {basic}"}
        if authorization == accepted.get(registry.auth):
            return True
        challenge = {"Bearer": bearer, "Basic": 'Basic realm="r"'}.get(registry.auth, registry.auth)
        self._answer(401, headers={"WWW-Authenticate": challenge})
        return False

    def _token(self, form: bytes = b"") -> None:
        query = parse_qs(form.decode() or urlsplit(self.path).query)
        assert query["service"] == ["s"]
        assert query["scope"] in (["repository:models/tiny:pull"], ["repository:models/tiny:pull,push"])
        basic = base64.b64encode(f"{USER}:{SECRET}".encode()).decode()
        known = self.headers.get("Authorization") == f"Basic {basic}" or query.get("refresh_token") == [SECRET]
        self._answer(200 if known else 401, json.dumps({"token": TOKEN}).encode())

    def _found(self, data: bytes | None) -> tuple[int, bytes]:
        return (404, b'{"errors": [{"code": "UNKNOWN"}]}') if data is None else (200, data)

    def _blob(self, digest: str) -> None:
        registry = self.served
        status, data = self._found(registry.blobs.get(digest))
        headers = {}
        if (
            status == 200
            and registry.ranges
            and (asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")))
        ):
            first = int(asked[1])
            if first >= len(data):
                return self._answer(416)
            headers = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
            status, data = 206, data[first:]
        drops = registry.drops.get(digest, [])
        self._answer(status, data, headers, drops.pop(0) if drops and self.command == "GET" else None)

    def _answer(
        self, status: int, data: bytes = b"", headers: dict[str, str] | None = None, end: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:end])
        if end is not None:
            self.close_connection = True
