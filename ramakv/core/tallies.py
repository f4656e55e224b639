"""What the daemon counts of what it does: plain numbers, kept by whoever does it.

They lie on the path of every event, so counting is an addition, and nothing is computed before
somebody reads. Names, units and labels are given where they are read (`web/metrics.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ramakv.errors import BackendError, BackendTimeoutError, BackendUnavailableError

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Bounds of what takes time: from a look into memory to what nobody waits for any more."""

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Bounds of what comes in groups."""


HANDLED_STATUSES = (200, 400, 404, 409, 413, 500, 503)
"""What an event whose type is known is answered with: a figure that is 0 is there as well."""

UNREAD_STATUSES = (400, 401, 405, 408, 413, 503)
"""Likewise, what never came to be an event."""


class Histogram:
    """How many values lie in each bucket, and their sum.

    `counts[i]` are the values up to `bounds[i]` and above the bound before it; the last of
    `counts` are those above all bounds.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


class EventTally:
    """The events of one type: how many were answered with which status, and how fast."""

    __slots__ = ("seconds", "statuses")

    def __init__(self) -> None:
        self.statuses = Counter(dict.fromkeys(HANDLED_STATUSES, 0))
        self.seconds = Histogram()


class EventTallies:
    """All events, of the types that there are. Owned by the edge.

    What could not be read has no type, and is counted by status alone.
    """

    def __init__(self, types: Iterable[str]) -> None:
        self.by_type = {type_: EventTally() for type_ in types}
        self.unread = Counter(dict.fromkeys(UNREAD_STATUSES, 0))

    def answered(self, type_: str, status: int, seconds: float) -> None:
        """Count an event that was handled; how long that took."""
        tally = self.by_type[type_]
        tally.statuses[status] += 1
        tally.seconds.observe(seconds)

    def refused(self, type_: str | None, status: int) -> None:
        """Count an event, or a whole request, that never came to be handled."""
        tally = None if type_ is None else self.by_type.get(type_)
        statuses = self.unread if tally is None else tally.statuses
        statuses[status] += 1


@dataclass(slots=True)
class CallTally:
    """Calls of one kind to LMCache: how they ended, and how long they took.

    Owned by the backend actor.
    """

    ok: int = 0
    rejected: int = 0
    timeout: int = 0
    unavailable: int = 0
    seconds: Histogram = field(default_factory=Histogram)

    @contextmanager
    def timed(self, clock: Callable[[], float]) -> Iterator[None]:
        """Count a call, how it ended, and how long it took; unless it is cut off."""
        began = clock()
        try:
            yield
        except BackendError as error:
            self._ended(error, clock() - began)
            raise
        self._ended(None, clock() - began)

    def _ended(self, error: BackendError | None, seconds: float) -> None:
        match error:
            case None:
                self.ok += 1
            case BackendTimeoutError():
                self.timeout += 1
            case BackendUnavailableError():
                self.unavailable += 1
            case _:
                self.rejected += 1
        self.seconds.observe(seconds)


@dataclass(slots=True)
class PrefetchTallies:
    """What became of prefetches. Owned by the backend actor."""

    accepted: int = 0
    failed: int = 0
    late: int = 0
    """Dropped: they waited for so long that their turn had begun."""
    skipped: int = 0
    """Not sent, because LMCache was not to be asked: breaker, budget, or too many waiting."""
    chunks: int = 0
    """Chunks of those that were accepted."""


@dataclass(slots=True)
class HotTallies:
    """How many of the chunks that turns began with were hot. Owned by whoever can tell."""

    wanted: int = 0
    hot: int = 0


@dataclass(slots=True)
class EvictionTallies:
    """What became of the evictions of chunks. Owned by the queue that they wait in.

    Each one queued is done, or withdrawn (referenced again), or superseded (by a later release of
    the same chunk), or left (to LMCache's LRU, where residency found that better), or forgiven
    (LMCache lost the chunk in a restart), or dead; or it is there yet.
    """

    queued: int = 0
    done: int = 0
    withdrawn: int = 0
    superseded: int = 0
    left: int = 0
    forgiven: int = 0
    dead: int = 0
    retried: int = 0
    """How often one was queued again after its evict had failed."""


@dataclass(slots=True)
class CommitTallies:
    """Commits, and the transactions that they were grouped into. Owned by the journal."""

    sizes: Histogram = field(default_factory=lambda: Histogram(SIZES))
    """Commits in a transaction; one of bookkeeping alone has none."""
    seconds: Histogram = field(default_factory=Histogram)
    """How long a transaction took, with the way to the thread and back."""
    failed: int = 0
    """Transactions that could not be made."""
