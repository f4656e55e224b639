"""Runs trio programs in virtual time: sleeping costs nothing, and the same seed is the same run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import structlog
import trio
from trio.testing import MockClock

T = TypeVar("T")

EPOCH = 1_700_000_000.0
"""What a wall clock shows when virtual time begins."""


def run(
    main: Callable[[], Awaitable[T]],
    *,
    seed: int,
    instruments: Sequence[trio.abc.Instrument] = (),
) -> T:
    """Run `main` until it returns, without logs; time jumps when everything waits."""
    structlog.configure(processors=[_drop])
    try:
        _seed_scheduler(seed)
        clock = MockClock(autojump_threshold=0)
        return trio.run(main, clock=clock, instruments=list(instruments))
    finally:
        structlog.reset_defaults()


async def run_inline(function: Callable[..., Any], *args: Any, limiter: object = None) -> Any:
    """Stand in for a thread: the clock must not jump while one works."""
    await trio.lowlevel.checkpoint()
    return function(*args)


def wall_clock() -> float:
    """Seconds since 1970, in virtual time."""
    return EPOCH + trio.current_time()


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


def _seed_scheduler(seed: int) -> None:
    """Have trio shuffle the tasks that are ready by this seed, and by nothing else."""
    scheduler: Any = trio._core._run
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
