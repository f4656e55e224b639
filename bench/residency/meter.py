"""Splits this thread's CPU time among daemon, engine and replay, which run in one loop."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import trio

Who = Literal["daemon", "engine", "replay"]

_DAEMON = ("ramakv.actors.", "ramakv.service.")
_ENGINE = ("ramakv.lmcache.embedded.",)


class Meter(trio.abc.Instrument):
    """Charges time to whoever the task belongs to that runs, until one of another runs.

    So what the loop needs to come to a step is charged to who ran before it. Within a step
    `counting` says that somebody else is at work. The clock is read only where the one who is
    charged changes: it is a system call.
    """

    def __init__(self) -> None:
        self.seconds: dict[Who, float] = defaultdict(float)
        self._who: Who = "replay"
        self._since = time.thread_time()
        self._acting: dict[trio.lowlevel.Task, Who] = {}
        self._known: dict[str, Who] = {}

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Charge from now on whoever this task works for."""
        self._charge(self._acting.get(task) or self._whose(task.name))

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
        if who == self._who:
            return
        now = time.thread_time()
        self.seconds[self._who] += now - self._since
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
