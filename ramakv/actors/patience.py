"""Deadlines of many asks, kept by one task: a scope for each would cost more than the ask."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from ramakv.actors.requests import Ask
from ramakv.errors import UnavailableError


@dataclass(slots=True, eq=False)
class _Watched:
    deadline: float
    session_id: str
    ask: Ask | None


class Patience:
    """Refuses asks whose session did not get to them in time; what has begun may go on.

    All wait equally long, so those that came first are due first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watched: deque[_Watched] = deque()
        self._idle = trio.lowlevel.ParkingLot()

    @contextmanager
    def watching(self, session_id: str, ask: Ask) -> Iterator[None]:
        """Watch an ask for as long as the block waits for its reply."""
        watched = _Watched(trio.current_time() + self._seconds, session_id, ask)
        self._watched.append(watched)
        self._idle.unpark()
        try:
            yield
        finally:
            watched.ask = None  # its event may be large, and the deadline far away
            while self._watched and self._watched[0].ask is None:
                self._watched.popleft()

    async def run(self) -> None:
        """Keep the deadlines, until cancelled."""
        while True:
            if not self._watched:
                await self._idle.park()
                continue
            await trio.sleep_until(self._watched[0].deadline)
            while self._watched and self._watched[0].deadline <= trio.current_time():
                self._end(self._watched.popleft())

    def _end(self, watched: _Watched) -> None:
        if watched.ask is not None and watched.ask.withdraw():
            watched.ask.reply.fail(
                UnavailableError(
                    f"session '{watched.session_id}' did not get to this event within "
                    f"{self._seconds:g} s; nothing was changed"
                )
            )
