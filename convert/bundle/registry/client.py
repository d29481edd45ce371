"""The requests of the OCI distribution specification that push and pull need.

Credentials are sent to the registry's own host and to the token service that it names, never to a storage host that it
redirects to, and never over plain HTTP unless the registry is this machine or the caller allows it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar
from urllib.request import parse_http_list, parse_keqv_list

from d2sd.convert.bundle.registry.artifact import MANIFEST_TYPE, MAX_MANIFEST
from d2sd.convert.bundle.registry.credentials import PASSWORD, USERNAME, Credentials, find_credentials
from d2sd.convert.bundle.registry.reference import Reference
from d2sd.errors import RegistryError
from d2sd.extras import require
from d2sd.io import parse_json

if TYPE_CHECKING:
    import ssl

    import httpx

Result = TypeVar("Result")
Advance = Callable[[int], None]

#: Seconds before a request that failed in transit, or that the registry has no time for, is sent again.
PAUSES = (0.5, 1.0, 2.0)
_BUSY = {429, 500, 502, 503, 504}
#: Seconds without a byte. A registry that has received a large blob hashes it before it answers.
_CONNECT, _SILENCE = 30.0, 300.0
_CHUNK = 1 << 20
_MAX_ANSWER = 1 << 20


class RegistryClient:
    """One repository of a registry. A context manager; every method raises `RegistryError`."""

    def __init__(self, reference: Reference, *, plain_http: bool = False) -> None:
        require("registry", ("httpx",), "A registry")
        import httpx

        self._reference, self._plain = reference, plain_http
        host = "registry-1.docker.io" if reference.host == "docker.io" else reference.host
        self._origin = httpx.URL(f"{'http' if plain_http or reference.loopback else 'https'}://{host}")
        self._base = self._origin.join(f"/v2/{reference.name}/")
        self._authorization: str | None = None
        self._http = httpx.Client(
            verify=_tls(), timeout=httpx.Timeout(_SILENCE, connect=_CONNECT), max_redirects=5,
            event_hooks={"request": [self._guard]}, trust_env=not reference.loopback,
            headers={"User-Agent": "d2sd", "Accept-Encoding": "identity"},
        )  # fmt: skip

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def manifest(self, reference: str) -> bytes:
        """The bytes of the manifest of a tag or digest."""

        def attempt() -> bytes:
            with self._send("GET", f"manifests/{reference}", headers={"Accept": MANIFEST_TYPE}) as response:
                _expect(response, 200, self._reference.host)
                return _read(response, MAX_MANIFEST)

        return self._retried(attempt)

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has the blob."""

        def attempt() -> bool:
            with self._send("HEAD", f"blobs/{digest}") as response:
                if response.status_code != 404:
                    _expect(response, 200, self._reference.host)
                return response.status_code == 200

        return self._retried(attempt)

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
            with self._send("POST", "blobs/uploads/", headers={"Content-Length": "0"}) as response:
                _expect(response, 202, self._reference.host)
                location = response.url.join(response.headers.get("Location", "")).copy_merge_params({"digest": digest})
            headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
            with self._send("PUT", location, headers=headers, content=content) as response:
                _expect(response, 201, self._reference.host)

        self._retried(attempt)

    def put_manifest(self, reference: str, data: bytes) -> None:
        """Store a manifest under its digest or a tag."""

        def attempt() -> None:
            headers = {"Content-Type": MANIFEST_TYPE, "Content-Length": str(len(data))}
            with self._send("PUT", f"manifests/{reference}", headers=headers, content=lambda: iter([data])) as response:
                _expect(response, 201, self._reference.host)

        self._retried(attempt)

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
            with self._send("GET", f"blobs/{digest}", headers=headers) as response, partial.open("r+b") as file:
                if response.status_code == 200 and have:  # without support for ranges
                    advance(-have)
                    have = 0
                elif have and response.status_code != 416:
                    _expect(response, 206, self._reference.host)
                    if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                        raise _wrong_size(partial, digest, "another range than the requested one", size)
                elif not have:
                    _expect(response, 200, self._reference.host)
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

        self._retried(attempt)

    # -- one request --------------------------------------------------------------------------------------------------

    @contextmanager
    def _send(
        self,
        method: str,
        url: httpx.URL | str,
        *,
        headers: Mapping[str, str] | None = None,
        content: Callable[[], Iterator[bytes]] | None = None,
    ) -> Iterator[httpx.Response]:
        """Send a request and, if the registry asks for credentials, send it once more with them."""
        response = self._once(method, url, headers, content)
        if response.status_code == 401 and self._is_own(response.url):
            challenge = response.headers.get("WWW-Authenticate", "")
            response.close()
            self._authorization = self._answer(challenge)
            response = self._once(method, url, headers, content)
        try:
            yield response
        finally:
            response.close()

    def _once(
        self,
        method: str,
        url: httpx.URL | str,
        headers: Mapping[str, str] | None,
        content: Callable[[], Iterator[bytes]] | None,
    ) -> httpx.Response:
        request = self._http.build_request(
            method, self._base.join(url), headers=headers, content=content() if content else None
        )
        if self._authorization and self._is_own(request.url):
            request.headers["Authorization"] = self._authorization  # httpx drops it in a redirect to another host
        return self._http.send(request, stream=True, follow_redirects=method in ("GET", "HEAD"))

    def _retried(self, attempt: Callable[[], Result]) -> Result:
        import httpx

        for pause in (*PAUSES, None):
            try:
                return attempt()
            except (httpx.TransportError, _Busy) as error:
                failed = error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise RegistryError(
                    "The registry's answer cannot be used.", where=self._reference.host, found=error
                ) from None
            if pause is not None:
                time.sleep(pause)
        if isinstance(failed, _Busy):
            raise failed.error
        raise RegistryError(
            "The connection to the registry failed.", where=str(self._origin),
            found=str(failed) or type(failed).__name__, fix="check the network and the address, and run it again",
        )  # fmt: skip

    def _is_own(self, url: httpx.URL) -> bool:
        return (url.scheme, url.netloc) == (self._origin.scheme, self._origin.netloc)

    def _guard(self, request: httpx.Request) -> None:
        """Called before every request, those after a redirect included."""
        url = request.url
        if url.scheme == "https" or self._plain or Reference(url.netloc.decode(), "", "", None).loopback:
            return
        raise RegistryError(
            "The registry redirects to an address without TLS.", where=self._reference.host,
            found=f"{url.scheme}://{url.netloc.decode()}", fix="allow it with --plain-http on a trusted network",
        )  # fmt: skip

    # -- credentials --------------------------------------------------------------------------------------------------

    def _answer(self, challenge: str) -> str:
        """The Authorization header that answers a WWW-Authenticate header."""
        credentials = find_credentials(self._reference.host)
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "bearer":
            return f"Bearer {self._token(parse_keqv_list(parse_http_list(rest)), credentials)}"
        if scheme.lower() == "basic" and credentials and credentials.basic:
            return f"Basic {credentials.basic}"
        raise _refused(self._reference.host, f"401, {scheme or 'without a challenge'}", known=credentials is not None)

    def _token(self, challenge: dict[str, str], credentials: Credentials | None) -> str:
        """A token from the service that the registry names."""
        asked: dict[str, str] = {key: challenge[key] for key in ("service", "scope") if key in challenge}
        realm, headers = challenge.get("realm", ""), {}
        if credentials and credentials.identity_token:
            form = {"grant_type": "refresh_token", "refresh_token": credentials.identity_token, "client_id": "d2sd"}
            request = self._http.build_request("POST", realm, data=form | asked)
        else:
            if credentials:
                headers["Authorization"] = f"Basic {credentials.basic}"
            request = self._http.build_request("GET", realm, params=asked, headers=headers)
        response = self._http.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise _refused(self._reference.host, f"{response.status_code}", known=credentials is not None)
            values = parse_json(_read(response, _MAX_ANSWER).decode())
            token = values.get("token") or values.get("access_token")
            if not re.fullmatch(r"[A-Za-z0-9._~+/=-]+", token):
                raise ValueError
        except (ValueError, AttributeError, TypeError):
            raise RegistryError("The token service's answer cannot be used.", where=request.url.host) from None
        finally:
            response.close()
        return str(token)


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates of all authorities takes longer than the requests of a small artifact."""
    import httpx

    return httpx.create_ssl_context()


class _Busy(Exception):
    """The registry asks to try again later."""

    def __init__(self, error: RegistryError) -> None:
        self.error = error


def _expect(response: httpx.Response, status: int, host: str) -> None:
    """Raise the error of a response of another status."""
    found = response.status_code
    if found == status:
        return
    if found in (401, 403):
        raise _refused(host, _message(response), known=True)
    if found == 404:
        raise RegistryError(
            "The registry does not have it.", where=f"{host}{response.url.path}", found=_message(response),
            fix="check the name and the tag; some registries answer so without credentials",
        )  # fmt: skip
    error = RegistryError(
        "The registry refuses the request.", where=f"{host}{response.url.path}", found=_message(response)
    )
    if found in _BUSY:
        raise _Busy(error)
    raise error


def _refused(host: str, found: str, *, known: bool) -> RegistryError:
    return RegistryError(
        "The registry refuses the credentials." if known else "The registry asks for credentials.", where=host,
        found=found, fix=f"docker login {host}, or set {USERNAME} and {PASSWORD}",
    )  # fmt: skip


def _message(response: httpx.Response) -> str:
    """The status, and the message of an error in OCI's format."""
    status = f"{response.status_code} {response.reason_phrase}".strip()
    try:
        errors = parse_json(_read(response, _MAX_ANSWER).decode())["errors"]
        return f"{status}: {'; '.join(str(one.get('message') or one['code']) for one in errors)}"
    except (ValueError, KeyError, TypeError, AttributeError, RegistryError):
        return status


def _read(response: httpx.Response, most: int) -> bytes:
    """The body, of at most `most` bytes."""
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > most:
            raise RegistryError(
                "The registry's answer is too large.", where=response.url.host, expected=f"at most {most:,} bytes"
            )
    return bytes(data)


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
