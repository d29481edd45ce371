"""Requests to a registry: credentials, repetition, errors.

Credentials are sent to the registry's own host and to the token service that it names, never to a storage host that it
redirects to, and never over plain HTTP unless the registry is this machine or the caller allows it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TypeVar
from urllib.request import parse_http_list, parse_keqv_list

from d2sd.bundle.registry.credentials import PASSWORD, USERNAME, Credentials, find_credentials
from d2sd.bundle.registry.reference import Reference, is_loopback
from d2sd.errors import RegistryError
from d2sd.extras import require
from d2sd.io import parse_json

if TYPE_CHECKING:
    import ssl

    import httpx

Result = TypeVar("Result")

#: Seconds before a request that failed in transit, or that the registry has no time for, is sent again.
PAUSES = (0.5, 1.0, 2.0)
_BUSY = {429, 500, 502, 503, 504}
#: Seconds to connect, and without a byte. A registry that has received a large blob hashes it before it answers.
_CONNECT, _SILENCE, _HASHING = 30.0, 60.0, 600.0
_MAX_ANSWER = 1 << 20


class Connection:
    """Requests to one repository. Every method raises `RegistryError`."""

    def __init__(self, reference: Reference, actions: str, *, plain_http: bool = False) -> None:
        require("registry", ("httpx",), "A registry")
        import httpx

        self._reference, self._plain = reference, plain_http
        self._loopback, self._scope = is_loopback(reference.host), f"repository:{reference.name}:{actions}"
        host = "registry-1.docker.io" if reference.host == "docker.io" else reference.host
        self._origin = httpx.URL(f"{'http' if plain_http or self._loopback else 'https'}://{host}")
        self._base = self._origin.join(f"/v2/{reference.name}/")
        self._authorization: str | None = None
        self._known = False  # whether there are credentials
        self._http = httpx.Client(
            verify=_tls(), timeout=httpx.Timeout(_SILENCE, connect=_CONNECT), max_redirects=5,
            event_hooks={"request": [self._guard]}, trust_env=not self._loopback,
            headers={"User-Agent": "d2sd", "Accept-Encoding": "identity"},
        )  # fmt: skip

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @contextmanager
    def send(
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
        import httpx

        request = self._http.build_request(
            method,
            self._base.join(url),
            headers=headers,
            content=content() if content else None,
            timeout=httpx.Timeout(_HASHING if method == "PUT" else _SILENCE, connect=_CONNECT),
        )
        if self._authorization and self._is_own(request.url):
            request.headers["Authorization"] = self._authorization  # httpx drops it in a redirect to another host
        return self._http.send(request, stream=True, follow_redirects=method in ("GET", "HEAD"))

    def retried(self, attempt: Callable[[], Result]) -> Result:
        """Call `attempt` again while its requests fail in transit or the registry is busy."""
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
        if url.scheme == "https" or self._plain or (self._loopback and is_loopback(url.netloc.decode())):
            return
        raise RegistryError(
            "The registry redirects to an address without TLS.", where=self._reference.host,
            found=f"{url.scheme}://{url.netloc.decode()}", fix="allow it with --plain-http on a trusted network",
        )  # fmt: skip

    def expect(self, response: httpx.Response, status: int) -> None:
        """Raise the error of a response of another status."""
        found, where = response.status_code, f"{self._reference.host}{response.url.path}"
        if found == status:
            return
        if found in (401, 403):
            raise self._refused(_message(response))
        if found == 404:
            raise RegistryError(
                "The registry does not have it.", where=where, found=_message(response),
                fix="check the name and the tag; some registries answer so without credentials",
            )  # fmt: skip
        error = RegistryError("The registry refuses the request.", where=where, found=_message(response))
        raise _Busy(error) if found in _BUSY else error

    # -- credentials --------------------------------------------------------------------------------------------------

    def _answer(self, challenge: str) -> str:
        """The Authorization header that answers a WWW-Authenticate header."""
        credentials = find_credentials(self._reference.host)
        self._known = credentials is not None
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "bearer":
            try:
                fields = parse_keqv_list(parse_http_list(rest))
            except ValueError:
                raise self._refused("401, with a challenge that cannot be read") from None
            return f"Bearer {self._token(fields, credentials)}"
        if scheme.lower() == "basic" and credentials and credentials.basic:
            return f"Basic {credentials.basic}"
        raise self._refused(f"401, {scheme or 'without a challenge'}")

    def _refused(self, found: str) -> RegistryError:
        host = self._reference.host
        return RegistryError(
            f"The registry {'refuses the' if self._known else 'asks for'} credentials.", where=host, found=found,
            fix=f"docker login {host}, or set {USERNAME} and {PASSWORD}",
        )  # fmt: skip

    def _token(self, challenge: dict[str, str], credentials: Credentials | None) -> str:
        """A token from the service that the registry names."""
        # not the challenge's scope: that of a HEAD is `pull`, and some registries answer 403 when a push follows
        asked = {"scope": self._scope} | ({"service": challenge["service"]} if "service" in challenge else {})
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
                raise self._refused(_message(response))
            values = parse_json(read(response, _MAX_ANSWER).decode())
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


def _message(response: httpx.Response) -> str:
    """The status, and the message of an error in OCI's format."""
    status = f"{response.status_code} {response.reason_phrase}".strip()
    try:
        errors = parse_json(read(response, _MAX_ANSWER).decode())["errors"]
        return f"{status}: {'; '.join(str(one.get('message') or one['code']) for one in errors)}"
    except (ValueError, KeyError, TypeError, AttributeError, RegistryError):
        return status


def read(response: httpx.Response, most: int) -> bytes:
    """The body, of at most `most` bytes."""
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > most:
            raise RegistryError(
                "The registry's answer is too large.", where=response.url.host, expected=f"at most {most:,} bytes"
            )
    return bytes(data)
