"""What turns leave behind, and whether it is wanted again: learned from what later turns want.

Two questions. *The end of a map*: how many chunks at the end of a session's map its next turn has
no use for, such as a last one that was not full; to load them is a waste. *What is released*: how
much of what turn_ends no longer list comes back while LRU would still hold it, as where agents
alternate between contexts; then an evict takes what is about to be hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Sequence

from ramakv.core.chunks import ChunkHash

_END_MAX = 8
"""Chunks at the end of a map that are looked at."""

_END_STEP = 0.05
"""How far one turn moves the median."""

_REMEMBERED_MAX = 512
"""Released chunks that are watched for."""

_FADE = 1 - 1 / 512
_PRIOR_RELEASED, _PRIOR_RETURNED = 8.0, 4.0
_RETURNING = 0.02
"""From this share on, what is released is worth its place: LRU takes what is worth less."""


class Leavings:
    """What is known of it. It begins as if what is released came back."""

    __slots__ = ("_end", "_gone", "_released", "_returned")

    def __init__(self) -> None:
        self._end = 0.0
        self._gone: OrderedDict[ChunkHash, None] = OrderedDict()
        self._released, self._returned = _PRIOR_RELEASED, _PRIOR_RETURNED

    @property
    def unwanted_end(self) -> int:
        """Chunks at the end of a map that the next turn has no use for: the median."""
        return int(self._end + 0.5)

    @property
    def come_back(self) -> bool:
        """Whether what is released comes back so often that it should stay."""
        return self._returned > _RETURNING * self._released

    def continued(self, before: Sequence[ChunkHash], after: Sequence[ChunkHash]) -> bool:
        """Note the map that a turn began with, and the one that it left.

        Returns whether it had no use for half of it or more.
        """
        unwanted = 0
        for place in range(len(before) - 1, max(-1, len(before) - 1 - _END_MAX), -1):
            if place < len(after) and after[place] == before[place]:
                break
            unwanted += 1
        step = _END_STEP if unwanted > self._end else -_END_STEP
        self._end = max(0.0, self._end + step)
        # Hashes are chained: where two maps have the same one, they are alike up to there.
        middle = len(before) // 2
        return middle < len(before) and after[middle : middle + 1] != before[middle : middle + 1]

    def released(self, chunks: Collection[ChunkHash]) -> None:
        """Note that a turn no longer lists these."""
        for chunk in chunks:
            self._gone[chunk] = None
            self._released = self._released * _FADE + 1
            self._returned *= _FADE
        while len(self._gone) > _REMEMBERED_MAX:
            self._gone.popitem(last=False)

    def wanted(self, chunks: Collection[ChunkHash], held: Container[ChunkHash]) -> None:
        """Note that a turn wants these; `held` is what LRU holds."""
        if not self._gone.keys().isdisjoint(chunks):
            for chunk in chunks:
                if chunk in self._gone:
                    del self._gone[chunk]
                    self._returned += chunk in held
