"""One ordinary day, again and again: each time the next operation breaks, until none is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import get_args

import pytest

from tests.simulation.__main__ import judge
from tests.simulation.history import (
    DiskMode,
    Engine,
    EngineMode,
    Event,
    Fail,
    FailurePoint,
    History,
    Kill,
    Pause,
    Point,
    Restart,
    Send,
    Settle,
    Step,
)

_TRIES_MAX = 400


def one(type_: str, session: int, *chunks: int, other: int | None = None) -> Send:
    return Send((Event(type_, session, chunks, other=other),), waits=True)


ORDINARY_DAY: tuple[Step, ...] = (
    one("turn_end", 0, 1, 2, 3, 4),
    one("turn_end", 1, 1, 2, 9),
    one("session_fork", 0),
    one("turn_start", 0),
    one("turn_end", 0, 1, 2, 5),
    Pause(1.0),
    one("session_fork", 1, other=2),
    Send((Event("turn_end", 2, (1, 2, 9, 10)), Event("turn_end", 3, (1, 7)))),
    one("session_suspend", 1),
    Pause(1.0),
    one("turn_start", 1),
    one("snapshot_restore", 4, other=0),
    one("session_fork_end", 0),
    one("session_close", 0),
    one("session_close", 2),
    Pause(0.55),  # the evicts have just left
    one("turn_end", 5, 5, 10),
    one("turn_start", 5),
    Pause(2.0),
    one("turn_start", 3),
    one("turn_end", 3, 1),
    one("session_close", 4),
    Pause(10.0),
    Restart(),
    one("turn_end", 3, 1, 2),
    one("session_fork", 3),
    Settle(),
)


_SLEEPY = {"sessions__passivate_seconds": 0.8}
"""Actors go to sleep soon, so that sessions must be loaded."""


def until_clean(point: str, breaks: Callable[[int], Step], stride: int = 1) -> int:
    """Break the n-th operation for n = 1, 2, 3 …; returns how many there were to break.

    `stride` leaves some out where there are many, unless RAMAKV_EVERY_FAULT is set.
    """
    stride = 1 if os.environ.get("RAMAKV_EVERY_FAULT") else stride
    for nth in range(1, _TRIES_MAX, stride):
        settings = _SLEEPY if point.startswith("load") else {}
        report = judge(History(nth, settings, (breaks(nth), *ORDINARY_DAY)))
        if not report.counted[f"fault at {point}"]:
            return nth - 1
    raise AssertionError(f"{point} was reached more than {_TRIES_MAX} times")


@pytest.mark.parametrize("point", get_args(Point))
def test_a_kill_at_any_point_loses_nothing(point: Point) -> None:
    assert until_clean(point, lambda nth: Kill(point, nth)) >= 3


@pytest.mark.parametrize("disk", ["full", "locked", "failing", "read-only"])
@pytest.mark.parametrize("point", ["load.before", "commit.before"])
def test_a_database_that_fails_once_at_any_operation_changes_nothing(
    point: FailurePoint, disk: DiskMode
) -> None:
    assert until_clean(point, lambda nth: Fail(point, nth, disk), stride=2) >= 3


@pytest.mark.parametrize("point", ["send.before", "answer.before"])
def test_a_call_to_lmcache_that_fails_once_is_no_loss(point: FailurePoint) -> None:
    assert until_clean(point, lambda nth: Fail(point, nth)) >= 3


@pytest.mark.parametrize("mode", get_args(EngineMode))
def test_an_lmcache_that_is_ill_all_day_delays_nobody_and_loses_nothing(mode: EngineMode) -> None:
    for seed in range(5):
        judge(History(seed, {}, (Engine(mode, bad=(2, 9)), *ORDINARY_DAY)))
