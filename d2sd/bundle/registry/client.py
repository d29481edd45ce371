"""The operations of the OCI distribution specification that push and pull need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from d2sd.bundle.registry.artifact import MANIFEST_TYPE, MAX_MANIFEST
from d2sd.bundle.registry.connection import Connection, read
from d2sd.bundle.registry.reference import Reference
from d2sd.errors import RegistryError

Advance = Callable[[int], None]

_CHUNK = 1 << 20


class RegistryClient:
    """One repository of a registry. A context manager; every method raises `RegistryError`.

    `actions` are `pull` or `pull,push`: what a token is asked for.
    """

    def __init__(self, reference: Reference, actions: str, *, plain_http: bool = False) -> None:
        self._http = Connection(reference, actions, plain_http=plain_http)

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def manifest(self, reference: str) -> bytes:
        """The bytes of the manifest of a tag or digest."""

        def attempt() -> bytes:
            with self._http.send("GET", f"manifests/{reference}", headers={"Accept": MANIFEST_TYPE}) as response:
                self._http.expect(response, 200)
                return read(response, MAX_MANIFEST)

        return self._http.retried(attempt)

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has the blob."""

        def attempt() -> bool:
            with self._http.send("HEAD", f"blobs/{digest}") as response:
                if response.status_code != 404:
                    self._http.expect(response, 200)
                return response.status_code == 200

        return self._http.retried(attempt)

    def upload(self, digest: str, size: int, blob: Path | bytes, advance: Advance) -> None:
        """Send a blob of `size` bytes in one request, without reading it into memory."""
        sent = 0

        def content() -> Iterator[bytes]:
            nonlocal sent
            advance(-sent)  # of a request that was not completed
            sent = 0
            for chunk in _chunks(blob):
                yield chunk
                sent += len(chunk)
                advance(len(chunk))

        def attempt() -> None:
            with self._http.send("POST", "blobs/uploads/", headers={"Content-Length": "0"}) as response:
                self._http.expect(response, 202)
                location = response.url.join(response.headers.get("Location", "")).copy_merge_params({"digest": digest})
            headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
            with self._http.send("PUT", location, headers=headers, content=content) as response:
                self._http.expect(response, 201)

        self._http.retried(attempt)

    def put_manifest(self, reference: str, data: bytes) -> None:
        """Store a manifest under its digest or a tag."""

        def attempt() -> None:
            headers = {"Content-Type": MANIFEST_TYPE, "Content-Length": str(len(data))}
            with self._http.send(
                "PUT", f"manifests/{reference}", headers=headers, content=lambda: iter([data])
            ) as response:
                self._http.expect(response, 201)

        self._http.retried(attempt)

    def download(self, digest: str, size: int, partial: Path, advance: Advance) -> None:
        """Append to the file `partial` what it lacks of a blob of `size` bytes; its hash is not checked here.

        A dropped connection leaves what has arrived. `partial` is deleted if the blob is shorter or longer than `size`.
        """
        partial.touch()
        have = partial.stat().st_size
        advance(have)

        def attempt() -> None:
            nonlocal have
            headers = {"Range": f"bytes={have}-"} if have else {}
            if have == size:
                return
            with (
                self._http.send("GET", f"blobs/{digest}", headers=headers) as response,
                partial.open("r+b") as file,
            ):
                if response.status_code == 200 and have:  # without support for ranges
                    advance(-have)
                    have = 0
                elif have and response.status_code != 416:
                    self._http.expect(response, 206)
                    if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                        raise _wrong_size(partial, digest, "another range than the requested one", size)
                elif not have:
                    self._http.expect(response, 200)
                file.seek(have)
                file.truncate()
                if response.status_code != 416:  # the blob ends here
                    for chunk in response.iter_raw():  # with a size it would hold back what precedes a drop
                        if have + len(chunk) > size:
                            raise _wrong_size(partial, digest, "more", size)
                        file.write(chunk)
                        have += len(chunk)
                        advance(len(chunk))
                file.flush()
                os.fsync(file.fileno())
            if have < size:
                raise _wrong_size(partial, digest, f"{have:,} bytes", size)

        self._http.retried(attempt)


def _chunks(blob: Path | bytes) -> Iterator[bytes]:
    if isinstance(blob, bytes):
        yield blob
        return
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _wrong_size(partial: Path, digest: str, found: str, size: int) -> RegistryError:
    partial.unlink()
    return RegistryError(
        "A blob does not have the size that the artifact declares.", where=digest, found=found,
        expected=f"{size:,} bytes",
    )  # fmt: skip
