"""Counting by key, keeping no zeros."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")


def count_down(counts: Counter[K], key: K) -> int:
    """Count a key once less; returns what is left. A key that is not counted is a KeyError."""
    left = counts[key] - 1
    if left > 0:
        counts[key] = left
    else:
        counts.pop(key)  # Counter's own `del` is a Python call
    return left


def count_down_all(counts: Counter[K], keys: Iterable[K]) -> None:
    """Count each key once less. One that is not counted is a KeyError."""
    for key in keys:
        count_down(counts, key)
