"""The client that speaks LMCache's HTTP API. No retries hidden inside; one error tree."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import httpx
import msgspec
import trio

from ramakv.errors import BackendError, BackendRejectedError, BackendUnavailableError

_ERROR_TEXT_CHARS_MAX = 300
# Answers about the service and not about this call: no such route, not allowed, not now.
_UNAVAILABLE_STATUSES = frozenset({401, 403, 404, 405, 408, 425, 429, 501, 502, 503, 504})
_OUTAGE_SIGNS = ("urlopen error", "timed out", "Connection refused", "Connection reset")


class KVBackend(Protocol):
    """What the backend actor needs of a KV store. Every method raises BackendError."""

    async def prefetch(self, chunk_hashes: Sequence[str], lookup_id: str) -> None:
        """Ask for chunks to be brought up, in prefix order; returns when that was accepted."""

    async def evict(self, chunk_hashes: Sequence[str], locations: Sequence[str]) -> None:
        """Remove chunks from the named locations."""

    async def query(self, chunk_hashes: Sequence[str]) -> dict[str, list[str]] | None:
        """Say where each chunk lies; None where the store cannot tell."""


def fresh_lookup_id() -> str:
    """Return an id for one prefetch; the same id twice leaks in a real LMCache."""
    return uuid.uuid4().hex


class NoopBackend:
    """Accepts everything and does nothing."""

    async def prefetch(self, chunk_hashes: Sequence[str], lookup_id: str) -> None:
        """Accept."""

    async def evict(self, chunk_hashes: Sequence[str], locations: Sequence[str]) -> None:
        """Accept."""

    async def query(self, chunk_hashes: Sequence[str]) -> dict[str, list[str]] | None:
        """Tell nothing."""
        return None


class LMCacheClient:
    """Calls LMCache's scheduler, or one worker, under its base URL.

    Not more than `connections_max` calls may be under way at once: the caller limits them,
    because a wait for a pooled connection that is cancelled can leak the connection.
    """

    def __init__(
        self,
        base_url: str,
        *,
        connect_timeout_seconds: float,
        call_timeout_seconds: float,
        connections_max: int,
    ) -> None:
        self._call_timeout_seconds = call_timeout_seconds
        self._http = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(
                call_timeout_seconds, connect=connect_timeout_seconds, pool=call_timeout_seconds
            ),
            limits=httpx.Limits(
                max_connections=connections_max,
                # Below the 5 s after which uvicorn closes idle connections: no race with it.
                keepalive_expiry=2.0,
            ),
            trust_env=False,
            verify=False,  # noqa: S501 - plain http only; building a TLS context costs 30 ms
        )

    async def __aenter__(self) -> LMCacheClient:
        """Hold the connections open."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def prefetch(self, chunk_hashes: Sequence[str], lookup_id: str) -> None:
        """POST /memory/prefetch. Accepted means started, not present."""
        await self._post("/memory/prefetch", {"chunk_hashes": chunk_hashes, "lookup_id": lookup_id})

    async def evict(self, chunk_hashes: Sequence[str], locations: Sequence[str]) -> None:
        """POST /memory/evict. The count it answers is not to be trusted, and is not returned."""
        await self._post("/memory/evict", {"chunk_hashes": chunk_hashes, "locations": locations})

    async def query(self, chunk_hashes: Sequence[str]) -> dict[str, list[str]] | None:
        """POST /memory/query; None where this LMCache has no such route."""
        try:
            body = await self._post("/memory/query", {"chunk_hashes": chunk_hashes})
        except BackendError as error:
            answer = error.__cause__
            if isinstance(answer, httpx.HTTPStatusError) and answer.response.status_code == 404:
                return None
            raise
        try:
            return msgspec.convert(body, dict[str, list[str]])
        except msgspec.ValidationError as error:
            raise BackendRejectedError(
                f"/memory/query answered in a wrong form: {error}"
            ) from error

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            # httpx's own timeouts are per read: a byte now and then would keep a call for ever.
            with trio.fail_after(self._call_timeout_seconds):
                response = await self._http.post(path, content=msgspec.json.encode(body))
            response.raise_for_status()
        except trio.TooSlowError as error:
            raise BackendUnavailableError(
                f"{path}: no answer within {self._call_timeout_seconds:g} s"
            ) from error
        except httpx.HTTPStatusError as error:
            raise _refusal(path, error) from error
        except httpx.TimeoutException as error:
            raise BackendUnavailableError(
                f"{path}: no answer in time ({type(error).__name__})"
            ) from error
        except httpx.HTTPError as error:
            raise BackendUnavailableError(f"{path}: {error or type(error).__name__}") from error
        try:
            return msgspec.json.decode(response.content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BackendUnavailableError(f"{path}: the answer is not JSON: {error}") from error


def _refusal(path: str, error: httpx.HTTPStatusError) -> BackendError:
    """Tell an outage from a refusal of this very call."""
    status, text = error.response.status_code, error.response.text[:_ERROR_TEXT_CHARS_MAX]
    message = f"{path}: status {status}: {text}"
    if status in _UNAVAILABLE_STATUSES or any(sign in text for sign in _OUTAGE_SIGNS):
        return BackendUnavailableError(message)
    return BackendRejectedError(message)
