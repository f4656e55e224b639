"""The arithmetic: percentiles, medians, ratios of alternating rounds. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CURVE_PERCENTILES = (
    *(1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 97.0, 98.0),
    *(99.0, 99.3, 99.5, 99.7, 99.9, 99.95, 99.99, 100.0),
)
"""Where a latency distribution is kept."""


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return the smallest value that so many percent of the values are not above."""
    if not ascending:
        return math.nan
    rank = math.ceil(round(percent / 100 * len(ascending), 9))
    return ascending[max(rank, 1) - 1]


def curve(values: Sequence[float]) -> list[float]:
    """Return the values at `CURVE_PERCENTILES`."""
    ascending = sorted(values)
    return [percentile(ascending, percent) for percent in CURVE_PERCENTILES]


def at(a_curve: Sequence[float], percent: float) -> float:
    """Return a curve's value at one of `CURVE_PERCENTILES`."""
    return a_curve[CURVE_PERCENTILES.index(percent)]


def median(values: Sequence[float]) -> float:
    """Return the median; of no values, and of what could not be measured, nan."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the rounds' ratios.

    What is measured side by side shares what the machine does at that time: the ratio of a
    round is nearer to the truth than the ratio of two medians.
    """
    pairs = zip(ours, theirs, strict=False)
    return median([our / their for our, their in pairs if their])
