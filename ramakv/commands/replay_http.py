"""The calls of a replay over HTTP: events to a daemon, retrieve and store to an engine."""

from __future__ import annotations

from contextlib import aclosing

import httpx
import msgspec

from ramakv.commands.daemon_client import trusted
from ramakv.commands.replay_report import Answer
from ramakv.config import HOT_LOCATION
from ramakv.errors import ConfigError

REPLY_BYTES_MAX = 8 * 1024 * 1024
ERROR_CHARS_MAX = 200

_TIMEOUT = httpx.Timeout(30, connect=5).as_dict()
# Shorter than the keep-alive timeout of any usual server: a connection that the server is about
# to close must not carry a call.
_KEEPALIVE_SECONDS = 3.0


class _Envelope(msgspec.Struct):
    ok: bool
    error: str = ""


class _Retrieved(msgspec.Struct):
    found: dict[str, int]
    num_missing: int


_envelopes = msgspec.json.Decoder(_Envelope)
_retrieved = msgspec.json.Decoder(_Retrieved)


class HttpCalls:
    """Carries a replay's calls and tells what became of each."""

    def __init__(
        self,
        url: str,
        engine_url: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        """Connect nothing yet. Raises ConfigError if a URL or the CA file cannot be used."""
        self._daemon = _Server(usable_url("--url", url), ca_file, token)
        self._event = _at(self._daemon.base, "/event")
        self._engine = self._daemon
        if engine_url is not None:
            self._engine = _Server(usable_url("--engine-url", engine_url), ca_file)
        self._has_engine = engine_url is not None
        self._retrieve = _at(self._engine.base, "/engine/retrieve")
        self._store = _at(self._engine.base, "/engine/store")

    async def send(self, kind: str, body: bytes) -> Answer:
        """Carry one call of the given kind: the type of an event, or an engine's call."""
        try:
            if kind == "engine_retrieve":
                return _read_retrieved(*await self._engine.post(self._retrieve, body))
            if kind == "engine_store":
                return _read_stored(*await self._engine.post(self._store, body))
            return _read_envelope(*await self._daemon.post(self._event, body))
        except httpx.RequestError as error:
            return Answer(error=_cause(error), answered=False)

    async def unreachable(self) -> str | None:
        """Say what keeps the daemon, or the engine, from being used; None if nothing does."""
        answer = await self.send("health", b'{"type":"health"}')
        if answer.error is not None:
            what = "unusable" if answer.answered else "unreachable"
            return f"the daemon at {self._daemon.base} is {what}: {answer.error}"
        if self._has_engine:
            try:
                await self._engine.request("GET", self._engine.base)
            except httpx.RequestError as error:
                return f"the engine at {self._engine.base} is unreachable: {_cause(error)}"
        return None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._daemon.aclose()
        await self._engine.aclose()


class _Server:
    """One HTTP server, reached over connections that are kept.

    Each connection has an httpx pool of its own, and whoever calls holds it alone: nobody ever
    waits inside a pool, so no cancelled wait can leak its slot (httpcore #1093), and no pool
    searches its other connections at every call, which would double the call's cost. The
    caller bounds how many are open by bounding its calls.
    """

    def __init__(self, base: httpx.URL, ca_file: str | None, token: str | None = None) -> None:
        self.base = base
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = trusted(str(base), ca_file)
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def post(self, url: httpx.URL, body: bytes) -> tuple[int, bytes]:
        return await self.request("POST", url, body)

    async def request(self, method: str, url: httpx.URL, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body. Raises httpx.RequestError where no usable reply comes."""
        request = httpx.Request(
            method, url, headers=self._headers, content=body, extensions={"timeout": _TIMEOUT}
        )
        connection = self._idle.pop() if self._idle else self._connection()
        try:
            response = await connection.handle_async_request(request)
            async with aclosing(response):
                reply = bytearray()
                async for part in response.aiter_raw():
                    reply += part
                    if len(reply) > REPLY_BYTES_MAX:
                        raise httpx.DecodingError(f"a reply of over {REPLY_BYTES_MAX} bytes")
            return response.status_code, bytes(reply)
        finally:
            self._idle.append(connection)

    def _connection(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(
            max_connections=1, max_keepalive_connections=1, keepalive_expiry=_KEEPALIVE_SECONDS
        )
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()


def usable_url(option: str, text: str) -> httpx.URL:
    """Return the base URL that an option gives. Raises ConfigError if it is none."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigError(f"{option} {text}: expected a URL like http://127.0.0.1:6998")
    return url


def _at(base: httpx.URL, path: str) -> httpx.URL:
    return base.copy_with(path=base.path.rstrip("/") + path, query=None)


def _read_envelope(status: int, body: bytes) -> Answer:
    try:
        envelope = _envelopes.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Answer(error=_refusal(status, body) + " (not a reply to an event)")
    if envelope.ok and status == 200:
        return Answer()
    return Answer(error=_refusal(status, envelope.error.encode()))


def _read_retrieved(status: int, body: bytes) -> Answer:
    if status != 200:
        return Answer(error=_refusal(status, body))
    try:
        reply = _retrieved.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Answer(error=f"not a reply to a retrieve: {error}")
    hot = reply.found.get(HOT_LOCATION, 0)
    return Answer(hot=hot, disk=sum(reply.found.values()) - hot, missing=reply.num_missing)


def _read_stored(status: int, body: bytes) -> Answer:
    return Answer() if status == 200 else Answer(error=_refusal(status, body))


def _cause(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__  # time-outs come without a text


def _refusal(status: int, body: bytes) -> str:
    text = " ".join(body[: 4 * ERROR_CHARS_MAX].decode(errors="replace").split())
    return f"HTTP {status}: {text[:ERROR_CHARS_MAX]}"
