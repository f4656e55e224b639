"""The database as a history has it: real SQLite, called inline, slow or failing as told."""

from __future__ import annotations

import math
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from ramakv.errors import StoreError
from ramakv.store.database import map_error
from ramakv.store.store import SessionWrite, Write
from tests.simulation.history import DiskMode
from tests.simulation.points import FaultPoints

SLOW_SECONDS_MAX = 0.5

_OPERATIONS = {"commit": "commit", "load_each": "load"}

_CODES: dict[DiskMode, int] = {
    "full": sqlite3.SQLITE_FULL,
    "locked": sqlite3.SQLITE_BUSY,
    "failing": sqlite3.SQLITE_IOERR,
    "read-only": sqlite3.SQLITE_READONLY,
}


def store_error(mode: DiskMode) -> StoreError:
    """Return the error that SQLite's own would be mapped to."""
    error = sqlite3.OperationalError(f"made up: the disk is {mode}")
    error.sqlite_errorcode = _CODES.get(mode, sqlite3.SQLITE_ERROR)
    return map_error(error, Path("sessions.db"))


@dataclass
class Disk:
    """Stands in for `trio.to_thread.run_sync`; the functions it runs are the real ones."""

    rng: random.Random
    points: FaultPoints
    committed: Callable[[Sequence[SessionWrite]], None]
    """Told of each commit the moment it is durable."""
    mode: DiskMode = "well"
    is_dead: bool = False
    """The daemon was killed: what it had not begun to write, it never will."""
    unsure: list[SessionWrite] = field(default_factory=list)
    """What a commit was about that did not come to its end: it may or may not be durable."""
    commits: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    _slow_until: float = -math.inf

    def was_slow_since(self, began: float) -> bool:
        """Whether the disk is a reason for an event of that time to have waited."""
        return self.mode == "slow" or self._slow_until >= began

    async def run_sync(
        self, function: Callable[..., Any], *args: Any, limiter: object = None
    ) -> Any:
        await trio.lowlevel.checkpoint()
        operation = _OPERATIONS.get(getattr(function, "__name__", ""))
        if operation is None:
            return function(*args)
        await self._wait()
        try:
            self.points.reach(f"{operation}.before")
            self._break(operation)
        except StoreError as error:
            if operation == "commit":
                raise
            return [error] * len(args[0])
        if self.is_dead:
            await trio.sleep_forever()
        writes: Sequence[Write] = args[0] if operation == "commit" else ()
        self.unsure = [write for write in writes if isinstance(write, SessionWrite)]
        result = function(*args)
        if operation == "commit":
            self.commits += 1
            self.committed(self.unsure)
        self.unsure = []
        self.points.reach(f"{operation}.after")
        return result

    async def _wait(self) -> None:
        if self.mode == "slow":
            self.faults["disk slow"] += 1
            seconds = self.rng.uniform(0, SLOW_SECONDS_MAX)
            self._slow_until = trio.current_time() + seconds
            # A thread's work is not cut short, and neither is this.
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)

    def _break(self, operation: str) -> None:
        mode = self.mode
        if mode in ("well", "slow"):
            return
        if mode == "flaky":
            if self.rng.random() < 0.6:
                return
            mode = self.rng.choice(tuple(_CODES))
        elif operation == "load" and mode in ("full", "read-only"):
            return  # reading goes on
        self.faults[f"disk {mode}"] += 1
        raise store_error(mode)
