"""Pacing of calls: token bucket, budget of prefetches, backoff. Times are in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """`calls_per_second` tokens a second, at most `burst_calls_max` saved up.

    An infinite rate never makes anybody wait.
    """

    calls_per_second: float
    burst_calls_max: float
    _tokens: float = math.nan
    _refilled_at: float = 0.0

    def take(self, now: float) -> bool:
        """Take one token if there is one."""
        # The same rounding as in `ready_at`: what is ready can be taken.
        if self.ready_at(now) > now:
            return False
        if not math.isinf(self.calls_per_second):
            self._tokens = max(0.0, self._tokens - 1.0)
        return True

    def reserve(self, now: float) -> float:
        """Take one token, if need be one of the future; returns when it is there."""
        if math.isinf(self.calls_per_second):
            return now
        self._refill(now)
        self._tokens -= 1.0
        return now + max(0.0, -self._tokens / self.calls_per_second)

    def tokens(self, now: float) -> float:
        """How many tokens there are."""
        self._refill(now)
        return self._tokens

    def ready_at(self, now: float) -> float:
        """When the next token is there; `now` if one is."""
        if math.isinf(self.calls_per_second):
            return now
        self._refill(now)
        return now + max(0.0, (1.0 - self._tokens) / self.calls_per_second)

    def _refill(self, now: float) -> None:
        if math.isnan(self._tokens):
            self._tokens = self.burst_calls_max
        else:
            gained = max(0.0, now - self._refilled_at) * self.calls_per_second
            self._tokens = min(self.burst_calls_max, self._tokens + gained)
        self._refilled_at = now


@dataclass(slots=True)
class PrefetchBudget:
    """How many prefetched chunks LMCache may hold that nobody consumed; 0: as many as it likes.

    LMCache is looked at now and then; in between, what was sent counts, and what was sent
    before the last look counts too, for it may have come later than that.
    """

    chunks_max: int
    held: int | None = None
    _sent: int = 0
    _sent_before: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether what LMCache says it holds is all it may."""
        return bool(self.chunks_max) and self.held is not None and self.held >= self.chunks_max

    def allows(self, chunks: int) -> bool:
        """Whether so many more may be sent. Yes, where LMCache does not say what it holds."""
        if not self.chunks_max or self.held is None:
            return True
        return self.held + self._sent_before + self._sent + chunks <= self.chunks_max

    def spend(self, chunks: int) -> None:
        """Count what is sent."""
        self._sent += chunks

    def look(self, held: int | None) -> None:
        """Take in what LMCache says it holds."""
        self.held = held
        self._sent_before, self._sent = self._sent, 0


def backoff_seconds(tries: int, base: float, ceiling: float, luck: float) -> float:
    """How long to wait after the given number of tries (1, 2, …); `luck` in [0, 1) is the jitter.

    Doubles from `base` to `ceiling`, then takes a random half of it off, so that those who
    failed together do not come back together.
    """
    full = min(ceiling, base * 2.0 ** min(tries - 1, 60))
    return full * (0.5 + 0.5 * luck)
