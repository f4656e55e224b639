"""Rates and quantiles, out of figures that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Sample(NamedTuple, Generic[T]):
    """What was counted up to a moment."""

    at: float
    figures: T


class Window(Generic[T]):
    """The samples of the last `seconds`: what they are compared with is the oldest of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: deque[Sample[T]] = deque()

    def add(self, at: float, figures: T) -> None:
        """Take a sample; those that are older than the window go."""
        self._samples.append(Sample(at, figures))
        while len(self._samples) > 2 and self._samples[1].at <= at - self._seconds:
            self._samples.popleft()

    @property
    def first(self) -> Sample[T]:
        """The oldest one. Raises IndexError while there is none."""
        return self._samples[0]

    @property
    def last(self) -> Sample[T]:
        """The newest one. Raises IndexError while there is none."""
        return self._samples[-1]

    @property
    def seconds(self) -> float:
        """How long it lasts by now."""
        return self.last.at - self.first.at if self._samples else 0.0


def per_second(before: float, after: float, seconds: float) -> float:
    """How fast a figure grew; 0 where there was no time."""
    return (after - before) / seconds if seconds > 0 else 0.0


def since(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """What came into each bucket."""
    return [new - old for old, new in zip(before, after, strict=True)]


def added(tables: Sequence[Sequence[int]]) -> list[int]:
    """Buckets of several histograms together."""
    return [sum(column) for column in zip(*tables, strict=True)]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Estimate a quantile from buckets, as if values lay evenly in each; None without values.

    A value above all bounds counts as the last bound.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below, lower = share * total, 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return lower + (bound - lower) * (rank - below) / count
        below, lower = below + count, bound
    return float(bounds[-1])
