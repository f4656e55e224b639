"""Which events may go now: each session's in their order, different sessions' side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Lanes(Generic[T]):
    """A queue for each session. An item stands in the lanes of all the sessions it touches.

    It may go when it is the first in every one of them. Items only ever wait for items that came
    before them, so they cannot wait in a ring. An item that touches no session may go at once.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, deque[T]] = {}
        self._sessions: dict[T, tuple[str, ...]] = {}

    def __len__(self) -> int:
        """How many items there are, in all lanes together."""
        return len(self._sessions)

    def __iter__(self) -> Iterator[T]:
        """All items, in the order in which they came."""
        return iter(self._sessions)

    def add(self, item: T, sessions: Collection[str]) -> bool:
        """Put an item last. Return whether it may go."""
        self._sessions[item] = tuple(dict.fromkeys(sessions))
        for session in self._sessions[item]:
            self._lanes.setdefault(session, deque()).append(item)
        return self._may_go(item)

    def remove(self, item: T) -> list[T]:
        """Take an item out, wherever it stands. Return those that may go because of that."""
        freed: dict[T, None] = {}
        for session in self._sessions.pop(item):
            lane = self._lanes[session]
            was_first = lane[0] is item
            lane.remove(item)
            if not lane:
                del self._lanes[session]
            elif was_first:
                freed[lane[0]] = None
        return [other for other in freed if self._may_go(other)]

    def _may_go(self, item: T) -> bool:
        return all(self._lanes[session][0] is item for session in self._sessions[item])
