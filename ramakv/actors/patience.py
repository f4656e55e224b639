"""Deadlines of many asks, kept by one task: a scope for each would cost more than the ask."""

from __future__ import annotations

from collections import deque

import trio
from msgspec import Struct

from ramakv.actors.requests import Ask
from ramakv.errors import UnavailableError


class Watched(Struct, eq=False):
    """An ask and its deadline."""

    deadline: float
    session_id: str
    ask: Ask | None


class Patience:
    """Refuses asks whose session did not get to them in time; what has begun may go on.

    All wait equally long, so those that came first are due first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watched: deque[Watched] = deque()
        self._idle = trio.lowlevel.ParkingLot()

    def watch(self, session_id: str, ask: Ask) -> Watched:
        """Watch an ask, until `forget`."""
        watched = Watched(trio.current_time() + self._seconds, session_id, ask)
        if not self._watched:
            self._idle.unpark()
        self._watched.append(watched)
        return watched

    def forget(self, watched: Watched) -> None:
        """Watch it no more: nobody waits for it."""
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

    def _end(self, watched: Watched) -> None:
        if watched.ask is not None and watched.ask.withdraw():
            watched.ask.reply.fail(
                UnavailableError(
                    f"session '{watched.session_id}' did not get to this event within "
                    f"{self._seconds:g} s; nothing was changed"
                )
            )
