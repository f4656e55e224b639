"""Chunk statistics: how many chunks were looked up or stored, and how many different ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import msgspec

UNIQUE_CHUNKS_MAX = 1_000_000
"""Different chunks that are remembered; with one more, the collecting ends by itself."""


class ExitConditions(msgspec.Struct, frozen=True, kw_only=True):
    """When the collecting ends by itself; 0 is never."""

    timeout_hours: float = 0.0
    target_unique_chunks: int = 0

    @property
    def enabled(self) -> bool:
        """Whether there is any."""
        return self.timeout_hours > 0 or self.target_unique_chunks > 0


class ChunkStatistics:
    """Counts while it collects. Time is an argument, in seconds."""

    def __init__(self) -> None:
        """Start without collecting."""
        self._collecting_since: float | None = None
        self.total_requests = 0
        self.total_chunks = 0
        self._seen: set[bytes] = set()

    @property
    def started(self) -> bool:
        """Whether it collects, unless a condition has been met since the last look."""
        return self._collecting_since is not None

    @property
    def unique_chunks(self) -> int:
        """How many different chunks there were."""
        return len(self._seen)

    @property
    def duplicate_chunks(self) -> int:
        """How many chunks had been seen before."""
        return self.total_chunks - len(self._seen)

    def start(self, now: float) -> None:
        """Collect from now on; when that is so already, the time begins anew."""
        self._collecting_since = now

    def stop(self) -> None:
        """Collect no more, and keep the counts."""
        self._collecting_since = None

    def reset(self, now: float) -> None:
        """Forget the counts; who collects goes on, and the time begins anew."""
        self.total_requests = self.total_chunks = 0
        self._seen.clear()
        if self._collecting_since is not None:
            self._collecting_since = now

    def is_collecting(self, conditions: ExitConditions, now: float) -> bool:
        """Say whether chunks are counted, after ending it where a condition is met."""
        since = self._collecting_since
        if since is None:
            return False
        timeout_seconds = conditions.timeout_hours * 3600
        target = conditions.target_unique_chunks
        if (
            (timeout_seconds > 0 and now - since >= timeout_seconds)
            or (target > 0 and len(self._seen) >= target)
            or len(self._seen) >= UNIQUE_CHUNKS_MAX
        ):
            self.stop()
            return False
        return True

    def record(self, chunk_hashes: Iterable[str], conditions: ExitConditions, now: float) -> None:
        """Count the chunks of one lookup or store, up to the one that meets a condition."""
        if not self.is_collecting(conditions, now):
            return
        self.total_requests += 1
        for chunk_hash in chunk_hashes:
            digest = blake2b(chunk_hash.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            self.total_chunks += 1
            self._seen.add(digest)
            if not self.is_collecting(conditions, now):
                return
