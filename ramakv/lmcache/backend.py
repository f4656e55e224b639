"""What the daemon needs of a KV store, and the store that is none."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Protocol


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
