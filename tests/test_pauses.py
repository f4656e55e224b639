"""What is learned of pauses, and what a stay is said to yield."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from ramakv.core.pauses import STEPS, Pauses, ends_at, reason_of, step_of


def seen(*pauses: float) -> Pauses:
    """All of these, each followed to its end."""
    found = Pauses()
    for seconds in pauses:
        found.lasted(0, step_of(seconds))
        found.ended(step_of(seconds))
    found.learn(turn_seconds=5.0)
    return found


@given(st.floats(min_value=0, max_value=1e9))
def test_a_pause_is_in_the_step_that_its_age_says(seconds: float) -> None:
    step = step_of(seconds)
    assert 0 <= step < STEPS
    assert step == STEPS - 1 or seconds <= ends_at(step) * (1 + 1e-9)
    assert step == 0 or seconds >= ends_at(step - 1) * (1 - 1e-9)


def test_a_session_that_is_about_to_return_yields_more_than_one_that_left_just_now() -> None:
    found = seen(*[9.0 + 0.01 * number for number in range(100)])
    assert found.to_keep[step_of(8.0)] > 3 * found.to_keep[step_of(0.5)]


def test_who_is_away_for_longer_than_anybody_yields_little() -> None:
    found = seen(*[9.0 + 0.01 * number for number in range(100)])
    assert found.to_keep[step_of(500.0)] < 0.1 * found.to_keep[step_of(8.0)]


def test_what_must_be_loaded_first_yields_less_than_what_is_hot() -> None:
    found = seen(*(random.Random(1).expovariate(0.1) for _ in range(300)))
    for step in range(0, STEPS, 5):
        assert found.to_load[step] < found.to_keep[step]


def test_a_load_that_is_rarely_of_use_does_not_pay() -> None:
    found = Pauses()
    for _ in range(100):
        found.lasted(0, STEPS)
    for _ in range(20):
        found.ended(0)
    found.learn(5.0)
    assert found.to_load[step_of(3600.0)] == 0.0


def test_a_session_in_a_turn_yields_less_than_one_whose_turn_is_over() -> None:
    found = seen(*[9.0] * 100)
    assert 0 < found.while_running < found.to_keep[0]


def test_the_share_of_pauses_that_are_over_is_what_was_seen() -> None:
    found = seen(*[2.0] * 500, *[200.0] * 500)
    assert found.share_ended_by(1.0) < 0.1
    assert found.share_ended_by(20.0) == pytest.approx(0.5, abs=0.05)
    assert found.share_ended_by(2000.0) > 0.9


def test_the_load_of_late_counts_most() -> None:
    found = seen(*[2.0] * 5000)
    for _ in range(60):
        for _ in range(200):
            found.lasted(0, step_of(200.0))
            found.ended(step_of(200.0))
        found.learn(5.0)
    assert found.share_ended_by(20.0) < 0.1


@pytest.mark.parametrize(
    ("finish_reason", "reason"),
    [
        ("tool_calls", "tool"),
        ("tool_use", "tool"),
        ("stop", "end"),
        ("end_turn", "end"),
        ("length", "other"),
        (None, "unknown"),
    ],
)
def test_finish_reasons_of_several_apis_mean_the_same(
    finish_reason: str | None, reason: str
) -> None:
    assert reason_of(finish_reason) == reason
