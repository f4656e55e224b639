"""Faults on purpose: seeded, so that the same requests meet the same faults again. Pure."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from ramakv.config import Embedded


class Fault(NamedTuple):
    """What one request meets."""

    latency_seconds: float
    hangs: bool
    fails: bool


NO_FAULT = Fault(0.0, hangs=False, fails=False)


class Faults:
    """Draws what the requests to one port meet, in the order they come."""

    def __init__(self, config: Embedded, port_number: int) -> None:
        """Each port of an engine, 0 being the scheduler's, has a sequence of its own."""
        self._latency_seconds_max = config.fault_latency_seconds_max
        self._hang_share = config.fault_hang_share
        self._error_share = config.fault_error_share
        self._worker_share = config.fault_worker_share
        self._off = not (self._latency_seconds_max or self._hang_share or self._error_share)
        self._requests = Random(f"{config.fault_seed} requests {port_number}")  # noqa: S311
        self._workers = Random(f"{config.fault_seed} workers {port_number}")  # noqa: S311

    def draw(self) -> Fault:
        """Return what the next request meets."""
        if self._off:
            return NO_FAULT
        latency, hang, error = (self._requests.random() for _ in range(3))
        return Fault(
            latency * self._latency_seconds_max,
            hangs=hang < self._hang_share,
            fails=error < self._error_share,
        )

    def draw_worker_failure(self) -> bool:
        """Return whether the next call to a worker fails."""
        return self._worker_share > 0 and self._workers.random() < self._worker_share
