"""Who may do what at the admin listener: the token, and what browsers are lured into."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from ramakv.config_file import is_loopback
from ramakv.errors import ForbiddenError, UnauthorizedError
from ramakv.web.access import Bearer

ACTION_HEADER = b"x-ramakv-action"
"""A page of another site cannot send it without asking first, and is never told yes."""

Headers = Iterable[tuple[bytes, bytes]]


class Gate:
    """Looks at a request's head. Where no token is set, only this machine's own pages come in.

    Without a token a browser on this machine is the way in: any site's page can have it send
    requests here, and a site whose name suddenly resolves to 127.0.0.1 can read the answers. The
    first gives itself away by `Origin` and `Sec-Fetch-Site`, the second by `Host`.
    """

    def __init__(self, bearer: Bearer, *, is_unix: bool) -> None:
        self._bearer = bearer
        self._is_unix = is_unix

    def admits(self, headers: Headers) -> bool:
        """Whether a request carries the token, or none is asked for."""
        return self._bearer.admits(headers)

    def check_reading(self, headers: Headers) -> None:
        """Let a request read. Raises UnauthorizedError or ForbiddenError."""
        self.check_host(headers)
        if not self._bearer.admits(headers):
            raise UnauthorizedError("invalid or missing bearer token")
        if _first(headers, b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise ForbiddenError("a page of another site may not read here")

    def check_action(self, headers: Headers) -> None:
        """Let a request change something. Raises UnauthorizedError or ForbiddenError."""
        self.check_reading(headers)
        origin = _first(headers, b"origin")
        if origin is not None and urlsplit(_text(origin)).netloc != _text(
            _first(headers, b"host") or b""
        ):
            raise ForbiddenError("a page of another site may not change anything here")
        if _first(headers, ACTION_HEADER) is None:
            raise ForbiddenError(f"an action carries the header {ACTION_HEADER.decode()}: 1")

    def check_host(self, headers: Headers) -> None:
        """Refuse a name that only seems to be this machine's. Raises ForbiddenError."""
        if self._bearer.is_set or self._is_unix:
            return
        host = _text(_first(headers, b"host") or b"")
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if not is_loopback(name):
            raise ForbiddenError(
                f"this listener answers at 127.0.0.1 and localhost, not at {name[:100]!r}; "
                "to reach it by another name, set auth_token"
            )


def _first(headers: Headers, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip()
