"""How an event reaches the daemon: over HTTP, HTTPS or a unix socket. Maps httpx's errors once."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import Self

import httpx
import msgspec

from ramakv.client.settings import Settings
from ramakv.client.verdicts import Answer
from ramakv.errors import ConfigError, DaemonUnavailableError, OutcomeUnknownError

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 15.0
"""Above the 10 s after which the daemon itself refuses an event that did not get its turn, so that
one which is sent again cannot be overtaken by its own first copy."""
KEEP_ALIVE_SECONDS = 3.0
"""Well below the daemon's, so that no event goes out on a connection that is just being closed."""

_decode = msgspec.json.Decoder().decode


class Transport:
    """Posts events, `connections_max` at a time at most: the caller sees to that."""

    def __init__(
        self,
        settings: Settings,
        connections_max: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Raises ConfigError where the CA file cannot be used."""
        self._url = settings.url
        headers = {"Content-Type": "application/json"}
        if settings.token:
            headers["Authorization"] = f"Bearer {settings.token}"
        limits = httpx.Limits(
            max_connections=connections_max,
            max_keepalive_connections=connections_max,
            keepalive_expiry=KEEP_ALIVE_SECONDS,
        )
        base_url, path = self._url, None
        if base_url.startswith("unix:"):
            base_url, path = "http://localhost", base_url.removeprefix("unix:")
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            transport=transport
            or httpx.AsyncHTTPTransport(
                uds=path, limits=limits, trust_env=False, verify=_trusted(settings)
            ),
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def post(self, body: bytes) -> Answer:
        """Send an event and return what came back.

        Raises DaemonUnavailableError where it did not leave, OutcomeUnknownError where no answer
        came.
        """
        try:
            response = await self._http.send(self._request(body))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise DaemonUnavailableError(f"{self._url} cannot be reached: {error}") from error
        except (httpx.HTTPError, OSError) as error:
            what = str(error) or type(error).__name__
            raise OutcomeUnknownError(f"no answer from {self._url}: {what}") from error
        if response.status_code in (502, 504):  # from a proxy that got no answer either
            raise OutcomeUnknownError(f"no answer from {self._url}: {response.status_code}")
        return Answer(response.status_code, _envelope(response), _retry_after(response))

    def _request(self, body: bytes) -> httpx.Request:
        request = self._http.build_request(
            "POST", "/event", headers={"Content-Length": str(len(body))}
        )
        request.stream = _Body(body)
        return request


class _Body(httpx.AsyncByteStream):
    """A body in one piece.

    httpx's own is an async generator, and is left unfinished where the connection breaks: trio
    warns of those.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Once(self._body)


class _Once:
    def __init__(self, body: bytes) -> None:
        self._rest = [body]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self._rest:
            raise StopAsyncIteration
        return self._rest.pop()


def _envelope(response: httpx.Response) -> dict[str, object] | None:
    try:
        found = _decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 1.0


def _trusted(settings: Settings) -> ssl.SSLContext:
    if not settings.url.startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reading the system's CAs takes 30 ms
    try:
        return ssl.create_default_context(cafile=settings.ca_file or None)
    except OSError as error:  # an SSLError is one
        reason = "no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"ca_file {settings.ca_file}: {reason}") from error
