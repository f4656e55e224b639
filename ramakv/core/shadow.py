"""A hot tier in miniature: what a tier would hold, followed on a sample of the chunks.

A sample of chunks, taken by their hash, in a tier of the same share of the capacity behaves as
all of them in all of it (Waldspurger et al., "Efficient MRC Construction with SHARDS", 2015).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from itertools import islice

from ramakv.core.chunks import ChunkHash

SAMPLED_MAX = 512
"""Chunks that one miniature follows at most."""


def sampling_of(capacity: int) -> int:
    """Return n, where one chunk of n is followed of a tier of this capacity, in chunks."""
    return max(1, -(-capacity // SAMPLED_MAX))


def sample_of(chunks: Iterable[ChunkHash], one_of: int) -> list[ChunkHash]:
    """Return which of these distinct chunks are followed. Always the same in one process."""
    if one_of == 1:
        return list(chunks)
    return [chunk for chunk in chunks if not hash(chunk) % one_of]


class ShadowTier:
    """An LRU tier that holds names of chunks only.

    A request renews its chunks from the last to the first, as LMCache does, so that the head of
    a prefix goes last.
    """

    __slots__ = ("_chunks", "capacity", "displaced")

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.displaced = 0
        """Chunks that had to go for others, since the start."""
        self._chunks: OrderedDict[ChunkHash, None] = OrderedDict()  # the next to go is first

    def __len__(self) -> int:
        """Chunks that it holds."""
        return len(self._chunks)

    def hits(self, chunks: Sequence[ChunkHash]) -> int:
        """How many it holds of a prefix before the first that it does not."""
        for hits, chunk in enumerate(chunks):
            if chunk not in self._chunks:
                return hits
        return len(chunks)

    def __contains__(self, chunk: object) -> bool:
        """Whether it holds a chunk."""
        return chunk in self._chunks

    def missing(self, chunks: Set[ChunkHash]) -> int:
        """How many of these it does not hold."""
        return len(chunks) - len(self._chunks.keys() & chunks)

    def use(self, chunks: Sequence[ChunkHash]) -> None:
        """Hold these as the ones used last; those used longest ago go for them."""
        self._touch(reversed(chunks))

    def load(self, chunks: Sequence[ChunkHash]) -> None:
        """Hold these as a prefetch brings them up: from the first to the last."""
        self._touch(chunks)

    def _touch(self, chunks: Iterable[ChunkHash]) -> None:
        held = self._chunks
        renew = held.move_to_end
        for chunk in chunks:
            if chunk in held:
                renew(chunk)
            else:
                held[chunk] = None
        while len(held) > self.capacity:
            held.popitem(last=False)
            self.displaced += 1

    def renew(self, chunks: Sequence[ChunkHash]) -> None:
        """Make those of the chunks that are here the ones used last."""
        for chunk in reversed(chunks):
            if chunk in self._chunks:
                self._chunks.move_to_end(chunk)

    def drop(self, chunks: Iterable[ChunkHash]) -> None:
        """Hold these no longer."""
        for chunk in chunks:
            self._chunks.pop(chunk, None)

    def next_to_go(self, count: int) -> list[ChunkHash]:
        """The chunks used longest ago, at most so many."""
        return list(islice(self._chunks, count))

    def become(self, other: ShadowTier) -> None:
        """Hold what another one of the same capacity holds."""
        self._chunks = other._chunks.copy()
