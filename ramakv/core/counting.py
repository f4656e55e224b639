"""Counting by key, keeping no zeros. Plain dicts: `Counter` pays a Python call for each delete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")


def count_up(counts: dict[K, int], keys: Iterable[K]) -> None:
    """Count each key once more."""
    for key in keys:
        counts[key] = counts.get(key, 0) + 1


def count_down(counts: dict[K, int], key: K) -> int:
    """Count a key once less; returns what is left. A key that is not counted is a KeyError."""
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
    return left
