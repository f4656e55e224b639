"""Rates of the last seconds, out of the tallies that the actors keep."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import trio

from ramakv.core.rates import Window, added, per_second, quantile, since
from ramakv.core.tallies import SECONDS, Histogram
from ramakv.web.operable import Operable
from ramakv.web.snapshot import Rate, Store

POINTS_MAX = 300
_WINDOW_SECONDS = 5.0
_FAILED_FROM = 500
"""Statuses from here on are ours; below, somebody asked for what cannot be."""


class _Tally(NamedTuple):
    ok: int
    refused: int
    failed: int
    buckets: tuple[int, ...]

    @property
    def all(self) -> int:
        return self.ok + self.refused + self.failed


class _Figures(NamedTuple):
    events: dict[str, _Tally]
    calls: dict[str, _Tally]
    commits: int
    transactions: int


class Sampler:
    """Takes a sample a second, and a point of the series with it: cheap, and always on."""

    def __init__(self, service: Operable) -> None:
        self._service = service
        self._window: Window[_Figures] = Window(_WINDOW_SECONDS)
        self.points: deque[list[float | None]] = deque(maxlen=POINTS_MAX)
        self.sample()

    def sample(self) -> None:
        """Take a sample."""
        service = self._service
        answered = {
            name: _tally(tally.statuses, tally.seconds)
            for name, tally in service.answered.by_type.items()
        }
        unread = _tally(service.answered.unread, Histogram())
        calls = {
            name: _Tally(
                tally.ok,
                tally.rejected,
                tally.timeout + tally.unavailable,
                tuple(tally.seconds.counts),
            )
            for name, tally in service.backend.call_tallies.items()
        }
        figures = _Figures(
            {**answered, "": unread},
            calls,
            service.journal.commits,
            service.journal.transactions,
        )
        self._window.add(trio.current_time(), figures)
        self.points.append(self._point())

    def events(self) -> Rate:
        """All events together."""
        return self._total()

    def by_type(self) -> list[Rate]:
        """Events by type; those that never came are left out."""
        before, after = self._window.first.figures.events, self._window.last.figures.events
        return [self._rate(name, before[name], tally) for name, tally in after.items() if tally.all]

    def calls(self) -> list[Rate]:
        """Calls to LMCache by kind."""
        before, after = self._window.first.figures.calls, self._window.last.figures.calls
        return [self._rate(name, before[name], tally) for name, tally in after.items()]

    def store(self) -> Store:
        """What the journal does."""
        first, last = self._window.first.figures, self._window.last.figures
        seconds = self._window.seconds
        return Store(
            per_second(first.transactions, last.transactions, seconds),
            per_second(first.commits, last.commits, seconds),
            waiting=self._service.journal.statistics()["waiting"],
            failed=self._service.journal.tallies.failed,
        )

    def _rate(self, name: str, before: _Tally, after: _Tally) -> Rate:
        buckets = since(before.buckets, after.buckets)
        return Rate(
            name,
            per_second(before.all, after.all, self._window.seconds),
            quantile(SECONDS, buckets, 0.5),
            quantile(SECONDS, buckets, 0.99),
            ok=after.ok,
            failed=after.refused + after.failed,
        )

    def _total(self) -> Rate:
        first, last = self._window.first.figures, self._window.last.figures
        return self._rate("", _sum(first.events), _sum(last.events))

    def _point(self) -> list[float | None]:
        first, last = self._window.first.figures, self._window.last.figures
        total = self._total()
        failed = per_second(
            _sum(first.events).failed, _sum(last.events).failed, self._window.seconds
        )
        return [int(time.time() * 1000), total.per_second, total.p50, total.p99, failed]


def _tally(statuses: dict[int, int], seconds: Histogram) -> _Tally:
    ok, refused, failed = 0, 0, 0
    for status, count in statuses.items():
        if status >= _FAILED_FROM:
            failed += count
        elif status >= 400:
            refused += count
        else:
            ok += count
    return _Tally(ok, refused, failed, tuple(seconds.counts))


def _sum(tallies: dict[str, _Tally]) -> _Tally:
    return _Tally(
        sum(tally.ok for tally in tallies.values()),
        sum(tally.refused for tally in tallies.values()),
        sum(tally.failed for tally in tallies.values()),
        tuple(added([tally.buckets for tally in tallies.values()])),
    )
