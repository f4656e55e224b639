"""The token bucket, the backoff, and the breaker."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from ramakv.core.breaker import Breaker, BreakerState, Permit
from ramakv.core.pacing import TokenBucket, backoff_seconds


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(calls_per_second=2.0, burst_calls_max=3)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.ready_at(0.0) == 0.5
    assert [bucket.take(0.5), bucket.take(0.5), bucket.take(1.0)] == [True, False, True]


@given(st.lists(st.floats(0, 10), max_size=200), st.floats(0.1, 100), st.integers(1, 20))
def test_no_window_sees_more_than_burst_and_rate(
    gaps: list[float], rate: float, burst: int
) -> None:
    bucket = TokenBucket(rate, burst)
    now, taken = 0.0, 0
    for gap in gaps:
        now += gap
        taken += bucket.take(now)
    assert taken <= burst + rate * now + 1e-6


@given(st.floats(0.001, 1e6), st.integers(1, 50), st.floats(0, 1e9), st.integers(1, 50))
def test_what_is_ready_can_be_taken(rate: float, burst: int, start: float, takes: int) -> None:
    bucket = TokenBucket(rate, burst)
    now = start
    for _ in range(burst + takes):
        for _ in range(10):  # a rounded clock may need another look, but not for ever
            if (ready := bucket.ready_at(now)) <= now:
                break
            now = max(ready, math.nextafter(now, math.inf))
        assert bucket.take(now)


def test_a_reservation_borrows_from_the_future() -> None:
    bucket = TokenBucket(calls_per_second=1.0, burst_calls_max=1)
    assert [bucket.reserve(0.0) for _ in range(3)] == [0.0, 1.0, 2.0]
    assert not bucket.take(1.0)


def test_an_infinite_rate_makes_nobody_wait() -> None:
    bucket = TokenBucket(math.inf, 1)
    assert all(bucket.take(0.0) for _ in range(1000))
    assert (bucket.ready_at(5.0), bucket.reserve(5.0)) == (5.0, 5.0)


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_grows_to_its_ceiling_and_is_jittered(tries: int, luck: float) -> None:
    delay = backoff_seconds(tries, 0.5, 30.0, luck)
    full = min(30.0, 0.5 * 2.0 ** min(tries - 1, 60))
    assert full / 2 <= delay <= full


def test_the_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(failures_max=3, open_seconds=5.0)
    for _ in range(2):
        assert not breaker.failure(0.0, Permit.CALL)
    breaker.success()
    assert [breaker.failure(0.0, Permit.CALL) for _ in range(3)] == [False, False, True]
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow(4.9)


def test_an_open_breaker_lets_one_probe_pass() -> None:
    breaker = Breaker(failures_max=1, open_seconds=5.0)
    breaker.failure(0.0, Permit.CALL)
    assert breaker.probe_at() == 5.0
    assert breaker.allow(5.0)
    assert (breaker.state, breaker.allow(5.0), breaker.probe_at()) == (
        BreakerState.HALF_OPEN,
        None,
        math.inf,
    )
    assert breaker.success()
    assert breaker.allow(5.0)


def test_a_probe_that_fails_leaves_the_breaker_open() -> None:
    breaker = Breaker(failures_max=1, open_seconds=5.0)
    breaker.failure(0.0, Permit.CALL)
    probe = breaker.allow(5.0)
    assert probe is Permit.PROBE
    breaker.failure(6.0, probe)
    assert breaker.state is BreakerState.OPEN
    assert breaker.probe_at() == 11.0


def test_a_failure_of_a_call_that_left_before_does_not_push_the_probe_away() -> None:
    breaker = Breaker(failures_max=1, open_seconds=5.0)
    breaker.failure(0.0, Permit.CALL)
    breaker.failure(4.0, Permit.CALL)
    assert breaker.probe_at() == 5.0
    assert breaker.allow(5.0) is Permit.PROBE
    breaker.failure(6.0, Permit.CALL)
    assert breaker.allow(20.0) is None, "the probe is still under way"
