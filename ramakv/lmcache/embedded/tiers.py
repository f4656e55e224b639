"""What a tier holds: chunks by hash, the least recently used making room. Pure, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from hashlib import blake2b
from itertools import takewhile
from typing import Generic, TypeVar

import msgspec

from ramakv.config import DISK_LOCATION, HOT_LOCATION

__all__ = [
    "DISK_LOCATION",
    "HOT_LOCATION",
    "REMOTE_LOCATION",
    "HotTier",
    "LruTier",
    "TierStatistics",
    "chunk_payload",
]

REMOTE_LOCATION = "RemoteBackend"
"""Name of LMCache's remote tier: here, another folder."""

V = TypeVar("V")


class TierStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier holds now, and what became of its chunks since the start."""

    chunks: int
    chunks_max: int
    payload_bytes: int
    hits: int
    """Chunks that a retrieve took from this tier."""
    misses: int
    """Chunks that a retrieve asked of this tier and did not get."""
    evictions: int
    """Chunks taken out by an evict."""
    evictions_lru: int
    """Chunks displaced by newer ones."""


class LruTier(Generic[V]):
    """A map from chunk hash to a value, of at most `chunks_max` chunks.

    Putting one more displaces the chunk that was put, got or renewed longest ago.
    """

    def __init__(self, chunks_max: int, size_of: Callable[[V], int]) -> None:
        """Start empty. `size_of` says how many payload bytes a value stands for."""
        self.chunks_max = chunks_max
        self._size_of = size_of
        self._chunks: OrderedDict[str, V] = OrderedDict()  # the next to be displaced is first
        self._payload_bytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0
        self._evictions_lru = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk_hash: object) -> bool:
        return chunk_hash in self._chunks

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def peek(self, chunk_hash: str) -> V | None:
        """Return the chunk's value, or None, and leave its recency alone."""
        return self._chunks.get(chunk_hash)

    def prefix(self, chunk_hashes: Iterable[str]) -> int:
        """Return how many of the chunks, from the front to the first miss, are here."""
        return sum(1 for _ in takewhile(self._chunks.__contains__, chunk_hashes))

    def renew(self, chunk_hash: str) -> bool:
        """Make the chunk the most recently used one. Return whether it is here."""
        if chunk_hash not in self._chunks:
            return False
        self._chunks.move_to_end(chunk_hash)
        return True

    def put(self, chunk_hash: str, value: V) -> str | None:
        """Hold the chunk as the most recently used one. Return the hash it displaced, if any."""
        if chunk_hash in self._chunks:
            self.discard(chunk_hash)
        displaced = self._next_to_go() if self._is_full() else None
        if displaced is not None:
            self.discard(displaced)
            self._evictions_lru += 1
        self._chunks[chunk_hash] = value
        self._payload_bytes += self._size_of(value)
        return displaced

    def discard(self, chunk_hash: str) -> bool:
        """Drop the chunk without counting an eviction. Return whether it was here."""
        value = self._chunks.pop(chunk_hash, None)
        if value is None:
            return False
        self._payload_bytes -= self._size_of(value)
        return True

    def evict(self, chunk_hashes: Iterable[str]) -> list[str]:
        """Drop these chunks. Return the hashes of those that were here."""
        evicted = [chunk_hash for chunk_hash in chunk_hashes if self.discard(chunk_hash)]
        self._evictions += len(evicted)
        return evicted

    def clear(self) -> int:
        """Drop every chunk. Return how many there were."""
        return len(self.evict(list(self._chunks)))

    def count(self, *, hits: int = 0, misses: int = 0) -> None:
        """Add to the hits and misses that `statistics` reports."""
        self._hits += hits
        self._misses += misses

    def statistics(self) -> TierStatistics:
        """Return the counts of this moment."""
        return TierStatistics(
            chunks=len(self._chunks),
            chunks_max=self.chunks_max,
            payload_bytes=self._payload_bytes,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            evictions_lru=self._evictions_lru,
        )

    def _is_full(self) -> bool:
        return len(self._chunks) >= self.chunks_max

    def _next_to_go(self) -> str | None:
        return next(iter(self._chunks), None)


class HotTier(LruTier[bytes]):
    """The chunks in host memory, with their bytes.

    Prefetches hold nothing here; `PinningHotTier` is where they do.
    """

    def __init__(self, chunks_max: int) -> None:
        super().__init__(chunks_max, size_of=len)

    @property
    def pinned(self) -> int:
        """How many chunks are held by prefetches."""
        return 0

    def begin(self, lookup_id: str | int) -> None:
        """Begin to hold for this prefetch."""

    def hold(self, lookup_id: str | int, chunk_hashes: Iterable[str]) -> None:
        """Hold those of the chunks that are here."""

    def consume(self, lookup_id: str | int) -> None:
        """Let go of what this prefetch holds."""

    def holders(self) -> Set[str | int]:
        """Return the prefetches that hold chunks."""
        return frozenset()


def chunk_payload(chunk_hash: str, chunk_bytes: int) -> bytes:
    """Return the `chunk_bytes` bytes that stand for this chunk's KV cache: always the same ones."""
    digest = blake2b(chunk_hash.encode("utf-8", "surrogatepass")).digest()
    return (digest * (chunk_bytes // len(digest) + 1))[:chunk_bytes]
