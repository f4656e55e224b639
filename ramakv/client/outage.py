"""Waiting while the daemon cannot be reached: one event at a time tries, later and later."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

WAIT_SECONDS_BASE = 0.1
WAIT_SECONDS_MAX = 5.0


class Outage:
    """Whether the daemon can be reached, as far as the last tries tell."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._failures = 0
        self._began_at = 0.0
        self._try_at = 0.0
        self._turnstile = anyio.Lock()

    @property
    def is_on(self) -> bool:
        """Whether the last event that was tried found nobody."""
        return self._failures > 0

    def begin(self, tried_at: float) -> bool:
        """An event found nobody: wait before the next try, twice as long as before.

        One that was tried before this outage was known tells nothing new. Return whether the
        outage begins with it.
        """
        if self.is_on and tried_at < self._began_at:
            return False
        longest = min(WAIT_SECONDS_BASE * 2.0 ** min(self._failures, 16), WAIT_SECONDS_MAX)
        self._failures += 1
        # An absolute time: whoever waits next does not begin anew.
        now = anyio.current_time()
        self._try_at = now + longest * self._rng.uniform(0.5, 1.0)
        if self._failures == 1:
            self._began_at = now
        return self._failures == 1

    def end(self) -> float:
        """The daemon answered. Return how long it did not, in seconds; 0: it always did."""
        was_on, self._failures = self.is_on, 0
        return anyio.current_time() - self._began_at if was_on else 0.0

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait until an event may be tried: at once, or in an outage alone and in its time."""
        if self.is_on:
            async with self._turnstile:
                if self.is_on:
                    await anyio.sleep_until(self._try_at)
                    yield
                    return
        yield
