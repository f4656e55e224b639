"""The hot tier of LMCache 0.4.4, where a prefetch that nobody consumes is never let go. Pure.

Each chunk that a prefetch loads is held by its lookup id. It is displaced by nothing, and an
evict takes it out of the index only: its memory stays taken until a retrieve with that id
consumes the prefetch. Another prefetch of the same id takes the id over, and then nobody can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from ramakv.lmcache.embedded.tiers import HotTier


class PoolExhaustedError(Exception):
    """There is no memory for a chunk, and none can be freed."""


@dataclass(eq=False, slots=True)
class _Held:
    """The memory of one chunk. Compared by identity: a chunk loaded again is another one."""

    chunk_hash: str
    holders: int = 0
    in_index: bool = True


class PinningHotTier(HotTier):
    """A hot tier whose chunks may be held."""

    def __init__(self, chunks_max: int) -> None:
        """Start empty."""
        super().__init__(chunks_max)
        self._held: dict[str, _Held] = {}  # those in the index
        self._by_lookup: dict[str | int, list[_Held]] = {}
        self._outside = 0  # held, and no more in the index

    @property
    def pinned(self) -> int:
        """How many chunks are held, in the index or not."""
        return len(self._held) + self._outside

    def holders(self) -> Set[str | int]:
        """Return the prefetches that hold chunks."""
        return self._by_lookup.keys()

    def begin(self, lookup_id: str | int) -> None:
        """Begin to hold for this prefetch. What the id held before stays held for ever."""
        self._by_lookup.pop(lookup_id, None)

    def hold(self, lookup_id: str | int, chunk_hashes: Iterable[str]) -> None:
        """Hold those of the chunks that are here."""
        for chunk_hash in chunk_hashes:
            if chunk_hash in self:
                held = self._held.setdefault(chunk_hash, _Held(chunk_hash))
                held.holders += 1
                self._by_lookup.setdefault(lookup_id, []).append(held)

    def consume(self, lookup_id: str | int) -> None:
        """Let go of what this prefetch holds."""
        for held in self._by_lookup.pop(lookup_id, ()):
            held.holders -= 1
            if held.holders == 0:
                if held.in_index:
                    del self._held[held.chunk_hash]
                else:
                    self._outside -= 1

    def put(self, chunk_hash: str, value: bytes) -> str | None:
        """Hold the chunk. Raises PoolExhaustedError, with nothing changed but for LRU."""
        held = self._held.get(chunk_hash)
        taken = len(self) + self._outside - (chunk_hash in self and held is None)
        if taken >= self.chunks_max and self._next_to_go() is None:
            raise PoolExhaustedError
        return super().put(chunk_hash, value)

    def discard(self, chunk_hash: str) -> bool:
        """Drop the chunk from the index; if it is held, its memory stays taken."""
        held = self._held.pop(chunk_hash, None)
        if held is not None:
            held.in_index = False
            self._outside += 1
        return super().discard(chunk_hash)

    def clear(self) -> int:
        """Drop every chunk that is not held. Return how many those were."""
        return len(self.evict([chunk_hash for chunk_hash in self if chunk_hash not in self._held]))

    def _is_full(self) -> bool:
        return len(self) + self._outside >= self.chunks_max

    def _next_to_go(self) -> str | None:
        return next((chunk_hash for chunk_hash in self if chunk_hash not in self._held), None)


def put_while_room(
    hot: HotTier, chunk_hashes: Sequence[str], payload_of: Callable[[str], bytes]
) -> tuple[int, Sequence[str]]:
    """Put chunks into a hot tier and renew those that are there, while there is memory.

    Returns how many are new, and the chunks that are there now: all of them, where a prefetch
    holds nothing.
    """
    new = 0
    for position, chunk_hash in enumerate(chunk_hashes):
        if hot.renew(chunk_hash):
            continue
        try:
            hot.put(chunk_hash, payload_of(chunk_hash))
        except PoolExhaustedError:
            return new, chunk_hashes[:position]
        new += 1
    return new, chunk_hashes
