"""The routes of the Hugging Face hub that its library asks for the files of a model, with the faults that a hub has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: From this size on a file is stored by its SHA-256, as with LFS.
LARGE = 1000


@dataclass
class Hub:
    """Repositories by name, and what goes wrong."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)  # by repository: status and X-Error-Code
    token: str | None = None  # that a repository asks for
    cut: int | None = None  # bytes after which a large file's connection ends, once
    stall: float = 0.0  # seconds before a large file's answer
    hidden: dict[str, bytes] = field(
        default_factory=dict
    )  # files that the list alone has from which a client downloads
    wrong: bool = False  # bytes of large files differ from their hash
    url: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path, self.headers.get("Range") or ""))
        parts = path.removeprefix("/api/models").removeprefix("/").split("/", 3)
        if parts[0] == "api":
            return self._send(404, {}, b"", body)
        owner, name, kind, revision = [*parts, "revision", "main"][:4]
        repo = f"{owner}/{name}"
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._send(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}, b"", body)
        if repo in hub.errors:
            status, code = hub.errors[repo]
            return self._send(status, {"X-Error-Code": code} if code else {}, b"no", body)
        if repo not in hub.repos:
            return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"", body)
        files = hub.repos[repo]
        if revision.split("/")[0] not in (COMMIT, "main"):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"", body)
        if kind == "revision":
            siblings = [
                {"rfilename": file, "size": len(data)} | ({"lfs": _lfs(data)} if len(data) >= LARGE else {})
                for file, data in files.items()
            ]
            return self._json({"id": repo, "sha": COMMIT, "siblings": siblings}, body)
        if kind == "tree":
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": _sha1(data)}
                | ({"lfs": _lfs(data)} if len(data) >= LARGE else {})
                for file, data in (files | hub.hidden).items()
            ]
            return self._json(tree, body)
        self._file(files | hub.hidden, revision.split("/", 1)[1], body)

    def _file(self, files: Mapping[str, bytes], name: str, body: bool) -> None:
        hub = self.hub
        if name not in files:
            return self._send(404, {"X-Error-Code": "EntryNotFound"}, b"", body)
        data = files[name]
        is_large = len(data) >= LARGE
        headers = {"ETag": f'"{_lfs(data)["oid"] if is_large else _sha1(data)}"', "X-Repo-Commit": COMMIT}
        headers["Accept-Ranges"] = "bytes"
        if is_large and body and hub.stall:
            Event().wait(hub.stall)  # tests take away time.sleep
        if is_large and hub.wrong:
            data = bytes(len(data))
        begin = 0
        if asked := self.headers.get("Range"):
            begin = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        if is_large and body and hub.cut is not None and len(data) > hub.cut:
            cut, hub.cut = hub.cut, None
            self._send(206 if asked else 200, headers, data[begin:], True, cut)
            self.close_connection = True
            return None
        return self._send(206 if asked else 200, headers, data[begin:], body)

    def _json(self, value: object, body: bool) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode(), body)

    def _send(self, status: int, headers: Mapping[str, str], data: bytes, body: bool, most: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data[:most])


def _lfs(data: bytes) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    return {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 100}


def _sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub on a free port of the loopback device."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
