"""Pacing of calls: a token bucket, and the backoff between tries. Times are in seconds."""

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


def backoff_seconds(tries: int, base: float, ceiling: float, luck: float) -> float:
    """How long to wait after the given number of tries (1, 2, …); `luck` in [0, 1) is the jitter.

    Doubles from `base` to `ceiling`, then takes a random half of it off, so that those who
    failed together do not come back together.
    """
    full = min(ceiling, base * 2.0 ** min(tries - 1, 60))
    return full * (0.5 + 0.5 * luck)
