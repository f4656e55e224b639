"""The circuit breaker in front of LMCache."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class BreakerState(enum.StrEnum):
    """Closed: calls pass. Open: none does. Half open: one does, to see."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Permit(enum.Enum):
    """How a call was let pass."""

    CALL = enum.auto()
    PROBE = enum.auto()


@dataclass(slots=True)
class Breaker:
    """Opens after `failures_max` failures in a row; after `open_seconds` one call probes.

    Every call that `allow` let pass must end in `success` or `failure`, with what `allow` returned
    of it: calls that left before the breaker opened end late, and say nothing
    of the probe.
    """

    failures_max: int
    open_seconds: float
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    openings: int = 0
    """How often it opened while it was closed."""
    _probe_at: float = math.inf
    _probing: bool = False

    def can_pass(self, now: float) -> bool:
        """Whether `allow` would let a call pass."""
        if self.state is BreakerState.CLOSED:
            return True
        return not self._probing and now >= self._probe_at

    def allow(self, now: float) -> Permit | None:
        """Let a call pass, or not; a passed call of an open breaker is the probe."""
        if not self.can_pass(now):
            return None
        if self.state is BreakerState.CLOSED:
            return Permit.CALL
        self.state = BreakerState.HALF_OPEN
        self._probing = True
        return Permit.PROBE

    def probe_at(self) -> float:
        """When the next probe may leave: `inf` while closed or while one is under way."""
        if self.state is BreakerState.CLOSED or self._probing:
            return math.inf
        return self._probe_at

    def success(self) -> bool:
        """Note that LMCache answered. Returns whether this closed the breaker."""
        closed_now = self.state is not BreakerState.CLOSED
        self.state = BreakerState.CLOSED
        self.failures = 0
        self._probing = False
        self._probe_at = math.inf
        return closed_now

    def trip(self, now: float) -> None:
        """Open at once."""
        self.openings += self.state is BreakerState.CLOSED
        self.state = BreakerState.OPEN
        self._probing = False
        self._probe_at = now + self.open_seconds

    def failure(self, now: float, permit: Permit) -> bool:
        """Note that LMCache did not answer. Returns whether this opened the breaker."""
        self.failures += 1
        was_closed = self.state is BreakerState.CLOSED
        if was_closed and self.failures < self.failures_max:
            return False
        self.openings += was_closed
        if was_closed or permit is Permit.PROBE:
            self._probe_at = now + self.open_seconds
            self.state = BreakerState.OPEN
            self._probing = False
        return was_closed
