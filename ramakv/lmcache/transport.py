"""One HTTP call to LMCache: one deadline, no retries, and every failure in one error tree.

An answer is read by its body and not by its content type: a real LMCache sends JSON as
`text/plain`, and plain words as JSON.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import httpx
import msgspec
import trio

from ramakv.errors import (
    BackendError,
    BackendRejectedError,
    BackendTimeoutError,
    BackendUnavailableError,
    BackendUnsupportedError,
)
from ramakv.tracing import current

T = TypeVar("T")

Param = str | int | bool | Sequence[str]

_ERROR_TEXT_CHARS_MAX = 300
_JSON = (b"Content-Type", b"application/json")
# Answers about the service and not about this call: no such route, not allowed, not now.
_UNAVAILABLE_STATUSES = frozenset({401, 403, 404, 405, 408, 425, 429, 501, 502, 503, 504})
_UNSUPPORTED_STATUSES = frozenset({404, 405, 501})
_OUTAGE_SIGNS = ("urlopen error", "timed out", "Connection refused", "Connection reset")


class Reply:
    """An answer that came: its status, its bytes, and the path that was asked."""

    __slots__ = ("content", "path", "status")

    def __init__(self, path: str, status: int, content: bytes) -> None:
        self.path = path
        self.status = status
        self.content = content

    @property
    def text(self) -> str:
        """The body as text; what is not UTF-8 is replaced."""
        return self.content.decode(errors="replace")

    def require_success(self) -> None:
        """Raise the BackendError that the answer stands for, unless it is a 2xx."""
        if not 200 <= self.status < 300:
            raise self.refusal()

    def json(self) -> Any:
        """Return the body, decoded; raise BackendUnavailableError where it is not JSON."""
        try:
            return msgspec.json.decode(self.content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BackendUnavailableError(
                f"{self.path}: the answer is not JSON: {error}", status=self.status
            ) from error

    def refusal(self) -> BackendError:
        """Return the error that the answer stands for: an outage, or a no to this very call."""
        error, detail, failures = _read_error(self.content)
        said = ": ".join(filter(None, (error, detail, _listed(failures))))
        said = said or self.text or "nothing said"
        kind = _kind(self.status, [error, detail, *failures.values()])
        here = "not available here: " if kind is BackendUnsupportedError else ""
        return kind(
            f"{self.path}: {here}status {self.status}: {said[:_ERROR_TEXT_CHARS_MAX]}",
            status=self.status,
            error=error,
            detail=detail,
            failures=failures,
        )

    def convert(self, body: Any, kind: type[T]) -> T:
        """Return the decoded body as this type; raise BackendRejectedError where it is not one."""
        try:
            return msgspec.convert(body, kind)
        except msgspec.ValidationError as error:
            raise BackendRejectedError(
                f"{self.path} answered in a wrong form: {error}",
                status=self.status,
                detail=str(error),
            ) from error


class Caller:
    """Holds the connections to one port of LMCache, and makes calls one by one.

    Not more than `connections_max` calls may be under way at once: the caller limits them,
    because a wait for a pooled connection that is cancelled can leak the connection. `transport`
    carries the requests instead of those connections.
    """

    def __init__(
        self,
        base_url: str,
        *,
        connect_timeout_seconds: float,
        call_timeout_seconds: float,
        connections_max: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        url = httpx.URL(base_url)
        self._base_url = str(url.copy_with(userinfo=b"")).rstrip("/")
        self._headers = [(b"Host", url.netloc), (b"Accept", b"*/*"), (b"User-Agent", b"ramakv")]
        if url.userinfo:
            login = f"{url.username}:{url.password}".encode()
            self._headers.append((b"Authorization", b"Basic " + b64encode(login)))
        self._urls: dict[str, httpx.URL] = {}
        self._call_timeout_seconds = call_timeout_seconds
        timeout = httpx.Timeout(
            call_timeout_seconds, connect=connect_timeout_seconds, pool=call_timeout_seconds
        )
        self._extensions = {"timeout": timeout.as_dict()}
        # Not a client: its cookies, redirects and authentication are not for this API, and take
        # as long as all the rest.
        self._transport = transport or httpx.AsyncHTTPTransport(
            limits=httpx.Limits(
                max_connections=connections_max,
                # Below the 5 s after which uvicorn closes idle connections: no race with it.
                keepalive_expiry=3.5,
            ),
            trust_env=False,
            verify=False,  # plain http only; building a TLS context costs 30 ms
        )

    async def __aenter__(self) -> Self:
        """Hold the connections open."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Param | None] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Return whatever answer comes; raise BackendUnavailableError where none does."""
        seconds = self._call_timeout_seconds
        url = self._url(path, params)
        content = b"" if body is None else msgspec.json.encode(body)
        headers = self._headers.copy()
        if method != "GET":
            headers.append((b"Content-Length", b"%d" % len(content)))
        if body is not None:
            headers.append(_JSON)
        if (trace := current()) is not None:
            headers += [(key.encode(), value.encode()) for key, value in trace.headers().items()]
            trace.note({"http.request.method": method, "url.path": path})
        # With its headers whole and its body as a stream httpx has nothing to work out.
        stream = httpx.ByteStream(content)
        request = httpx.Request(
            method, url, headers=headers, stream=stream, extensions=self._extensions
        )
        try:
            # httpx's own timeouts are per read: a byte now and then would keep a call for ever.
            with trio.fail_after(seconds):
                response = await self._transport.handle_async_request(request)
                try:
                    answer = await response.aread()
                finally:
                    await response.aclose()
        except trio.TooSlowError as error:
            raise BackendTimeoutError(f"{path}: no answer within {seconds:g} s") from error
        except httpx.TimeoutException as error:
            raise BackendTimeoutError(
                f"{path}: no answer in time ({type(error).__name__})"
            ) from error
        except httpx.HTTPError as error:
            raise BackendUnavailableError(f"{path}: {error or type(error).__name__}") from error
        if trace is not None:
            trace.note({"http.response.status_code": response.status_code})
        return Reply(path, response.status_code, answer)

    def _url(self, path: str, params: Mapping[str, Param | None] | None) -> httpx.URL:
        if params:
            return httpx.URL(self._base_url + path + _query(params))
        if (url := self._urls.get(path)) is None:
            url = self._urls[path] = httpx.URL(self._base_url + path)
        return url

    async def _ask(
        self,
        kind: type[T],
        method: str,
        path: str,
        *,
        params: Mapping[str, Param | None] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> T:
        """Make a call that must succeed, and return its answer as this type."""
        reply = await self._call(method, path, params=params, body=body)
        reply.require_success()
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(reply.content, type=kind)  # in one pass: half the time
        return reply.convert(reply.json(), kind)  # in two, to say what is wrong


def _query(params: Mapping[str, Param | None]) -> str:
    """Write a query as the document does: lists repeat the name, commas and brackets are bare."""
    pairs: list[tuple[str, str]] = []
    for name, value in params.items():
        if isinstance(value, bool):
            pairs.append((name, "true" if value else "false"))
        elif isinstance(value, str | int):
            pairs.append((name, str(value)))
        elif value is not None:
            pairs.extend((name, item) for item in value)
    return f"?{urlencode(pairs, safe=',[]')}" if pairs else ""


def _kind(status: int, said: Sequence[str]) -> type[BackendError]:
    if status in _UNSUPPORTED_STATUSES:
        return BackendUnsupportedError
    if status in _UNAVAILABLE_STATUSES:
        return BackendUnavailableError
    # The scheduler answers 500 where it could not reach a worker.
    if status >= 500 and any(sign in text for sign in _OUTAGE_SIGNS for text in said):
        return BackendUnavailableError
    return BackendRejectedError


def _read_error(content: bytes) -> tuple[str, str, dict[str, str]]:
    """Return name, explanation and failed workers, from any of the forms LMCache uses."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = msgspec.json.decode(content)
        if isinstance(body, dict):
            failures = body.get("failures")
            return (
                _words(body.get("error")),
                _words(body.get("message")) or _words(body.get("detail")),
                {str(port): _words(why) for port, why in failures.items()}
                if isinstance(failures, dict)
                else {},
            )
    return "", content[:_ERROR_TEXT_CHARS_MAX].decode(errors="replace").strip(), {}


def _words(value: Any) -> str:
    """Return what a value of an error body says, in one line of plain words."""
    match value:
        case None:
            return ""
        case str():
            return value
        case list():
            return "; ".join(map(_words, value))
        case {"msg": said, "loc": [_, *_] as place}:
            return f"{'.'.join(map(str, place))}: {_words(said)}"
        case {"msg": said} | {"error": said} | {"detail": said} | {"message": said}:
            return _words(said)
    return msgspec.json.encode(value).decode()


def _listed(failures: Mapping[str, str]) -> str:
    return ", ".join(f"{port}: {why}" for port, why in failures.items())
