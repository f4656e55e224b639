"""Fault points: named places in the daemon's I/O where a history lets something break.

They lie in what the service is given from outside (how functions run in a thread, the transport
to LMCache, the edge's handler), so production code has no trace of them, and pays nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class FaultPoints:
    """Counts how often each point was reached, and acts when an armed one is."""

    reached: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    _armed: list[tuple[str, int, Callable[[], None]]] = field(default_factory=list)

    def arm(self, point: str, nth: int, action: Callable[[], None]) -> None:
        """Let `action` happen when `point` is reached for the n-th time from now."""
        self._armed.append((point, self.reached[point] + nth, action))

    def disarm(self) -> None:
        """Let nothing more happen that has not yet."""
        self._armed.clear()

    def reach(self, point: str) -> None:
        """Note that the daemon came to a point. What an armed action raises comes out here."""
        self.reached[point] += 1
        due = [armed for armed in self._armed if armed[:2] == (point, self.reached[point])]
        for armed in due:
            self._armed.remove(armed)
            self.fired[point] += 1
            armed[2]()
