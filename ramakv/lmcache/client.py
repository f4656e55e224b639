"""The client that asks LMCache what the daemon needs of a KV store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramakv.errors import BackendError, BackendUnsupportedError
from ramakv.lmcache.transport import Caller


class LMCacheClient(Caller):
    """Makes the daemon's few calls to LMCache's scheduler, or to one worker.

    Every method raises BackendUnavailableError or BackendRejectedError, whose `failures` name
    the workers that failed where a scheduler forwarded the call.
    """

    only_port_that_counts: int | None = None
    """With MLA ranks other than 0 hold nothing and fail at every forwarded call: not a failure."""

    async def prefetch(self, chunk_hashes: Sequence[str], lookup_id: str) -> None:
        """POST /memory/prefetch. Accepted means started, not present."""
        body = {"chunk_hashes": chunk_hashes, "lookup_id": lookup_id}
        await self._tell("/memory/prefetch", body)

    async def evict(self, chunk_hashes: Sequence[str], locations: Sequence[str]) -> None:
        """POST /memory/evict. The count it answers is not to be trusted, and is not returned."""
        body = {"chunk_hashes": chunk_hashes, "locations": locations}
        await self._tell("/memory/evict", body)

    async def _tell(self, path: str, body: dict[str, Any]) -> None:
        try:
            await self._ask(Any, "POST", path, body=body)
        except BackendError as error:
            failed = error.failures
            if self.only_port_that_counts is None or not failed:
                raise
            if str(self.only_port_that_counts) in failed:
                raise

    async def query(self, chunk_hashes: Sequence[str]) -> dict[str, list[str]] | None:
        """POST /memory/query; None where this LMCache has no such route."""
        body = {"chunk_hashes": chunk_hashes}
        try:
            return await self._ask(dict[str, list[str]], "POST", "/memory/query", body=body)
        except BackendUnsupportedError as error:
            if error.status == 404:
                return None
            raise
