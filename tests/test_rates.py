"""Rates and quantiles out of figures that only grow."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ramakv.core.rates import Window, added, per_second, quantile, since

BOUNDS = (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([10, 0, 0, 0], 0.5, 0.5),
        ([0, 10, 0, 0], 0.5, 1.5),
        ([5, 5, 0, 0], 0.99, 1.98),
        ([0, 0, 0, 7], 0.5, 4.0),  # above all bounds: at least the last
    ],
)
def test_a_quantile_lies_in_the_bucket_that_it_falls_into(
    counts: list[int], share: float, expected: float | None
) -> None:
    found = quantile(BOUNDS, counts, share)
    assert found == (None if expected is None else pytest.approx(expected))


@given(st.lists(st.floats(0.001, 3.999), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_no_further_off_than_its_bucket(values: list[float], share: float) -> None:
    counts = [0, 0, 0, 0]
    for value in values:
        counts[next(n for n, bound in enumerate(BOUNDS) if value <= bound)] += 1
    rank = max(1, -int(-share * len(values) // 1))
    exact = sorted(values)[rank - 1]
    found = quantile(BOUNDS, counts, share)
    assert found is not None
    bucket = next(n for n, bound in enumerate(BOUNDS) if exact <= bound)
    lower = BOUNDS[bucket - 1] if bucket else 0.0
    assert lower - 1e-9 <= found <= BOUNDS[bucket] + 1e-9


def test_a_window_compares_with_what_was_some_seconds_ago() -> None:
    window: Window[int] = Window(5.0)
    for second in range(20):
        window.add(float(second), second * 10)
    assert (window.first.at, window.last.at, window.seconds) == (14.0, 19.0, 5.0)
    assert per_second(window.first.figures, window.last.figures, window.seconds) == 10.0


def test_where_there_was_no_time_there_is_no_rate() -> None:
    window: Window[int] = Window(5.0)
    assert window.seconds == 0.0
    window.add(1.0, 5)
    assert per_second(window.first.figures, window.last.figures, window.seconds) == 0.0


def test_buckets_are_compared_and_added_one_by_one() -> None:
    assert since([1, 2], [4, 2]) == [3, 0]
    assert added([[1, 2], [10, 20]]) == [11, 22]
