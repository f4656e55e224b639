"""Counting by key, keeping no zeros."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Generic, TypeVar

K = TypeVar("K")


class Holds(Generic[K]):
    """How many hold each key, where there are millions and nearly all have one holder.

    A set of what is held, and a count of the holders beyond the first: a set keeps the hashes of
    its keys, and so fills in half the time of a dict of texts, which looks them up in each text.
    """

    __slots__ = ("_held", "_more")

    def __init__(self) -> None:
        self._held: set[K] = set()
        self._more: Counter[K] = Counter()

    def __len__(self) -> int:
        """Keys that are held."""
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        """Whether somebody holds a key."""
        return key in self._held

    def isdisjoint(self, keys: Collection[K]) -> bool:
        """Whether nobody holds any of these."""
        return not self._held or self._held.isdisjoint(keys)

    def count(self, key: K) -> int:
        """How many hold a key."""
        return (key in self._held) + self._more.get(key, 0)

    def hold(self, keys: Collection[K]) -> None:
        """Count one holder more of each of these; one that is listed twice counts once."""
        if not self._held.isdisjoint(keys):
            self._more.update({key for key in keys if key in self._held})
        self._held.update(keys)

    def let_go(self, key: K) -> int:
        """Count one holder less; returns how many are left. A key nobody holds is a KeyError."""
        if not (more := self._more.get(key, 0)):
            self._held.remove(key)
        elif more > 1:
            self._more[key] = more - 1
        else:
            self._more.pop(key)  # Counter's own `del` is a Python call
        return more

    def let_go_all(self, keys: Collection[K]) -> None:
        """Count one holder less of each of these, which are distinct; else as `let_go`."""
        if not self._more.keys().isdisjoint(keys):
            for key in keys:
                self.let_go(key)
            return
        before = len(self._held)
        self._held.difference_update(keys)
        if before - len(self._held) != len(keys):
            raise KeyError("a key that nobody holds")

    def shared(self) -> list[int]:
        """A copy of the counts of keys that more than one holds."""
        return [more + 1 for more in self._more.values()]

    def as_dict(self) -> dict[K, int]:
        """A copy of all counts."""
        return {key: self.count(key) for key in self._held}
