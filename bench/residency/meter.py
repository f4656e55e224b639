"""Splits this thread's CPU time among daemon, engine and replay, which run in one loop."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import trio

Who = Literal["daemon", "engine", "replay"]

_DAEMON = ("ramakv.actors.", "ramakv.service.")
_ENGINE = ("ramakv.lmcache.embedded.",)


class Meter(trio.abc.Instrument):
    """Charges a step's time to whoever the task belongs to that makes it.

    Within a step `counting` says that somebody else is at work. What the loop needs between
    steps, all alike, is charged by their number.
    """

    def __init__(self) -> None:
        self._in_steps: dict[Who, float] = defaultdict(float)
        self._steps: Counter[Who] = Counter()
        self._between = 0.0
        self._who: Who = "replay"
        self._since = time.thread_time()
        self._acting: dict[trio.lowlevel.Task, Who] = {}
        self._known: dict[str, Who] = {}

    @property
    def seconds(self) -> dict[Who, float]:
        """CPU seconds of each so far."""
        step = self._between / max(1, self._steps.total())
        return {who: self._in_steps[who] + step * self._steps[who] for who in get_args(Who)}

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Charge from now on whoever this task works for."""
        now = time.thread_time()
        self._between += now - self._since
        self._since, self._who = now, self._acting.get(task) or self._whose(task.name)
        self._steps[self._who] += 1

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """End the charge."""
        self._charge(self._who)

    @contextmanager
    def counting(self, who: Who) -> Iterator[None]:
        """Charge what this task does in the block to `who`."""
        task = trio.lowlevel.current_task()
        before = self._acting.get(task)
        self._acting[task] = who
        self._charge(who)
        try:
            yield
        finally:
            if before is None:
                del self._acting[task]
            else:
                self._acting[task] = before
            self._charge(before or self._whose(task.name))

    def _charge(self, who: Who) -> None:
        now = time.thread_time()
        self._in_steps[self._who] += now - self._since
        self._since, self._who = now, who

    def _whose(self, name: str) -> Who:
        known = self._known.get(name)
        if known is None:
            known = "replay"
            if name.startswith(_DAEMON):
                known = "daemon"
            elif name.startswith(_ENGINE):
                known = "engine"
            self._known[name] = known
        return known
