"""The sweep over all sessions: passivates idle actors, ends what nobody uses, forgets closes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import trio

from ramakv.actors.mailbox import Reply
from ramakv.actors.places import Place
from ramakv.actors.requests import Expire, Outcome, Request
from ramakv.actors.session import SessionActor
from ramakv.actors.surroundings import Surroundings
from ramakv.core.session import is_remembered
from ramakv.errors import RamakvError, StoreError, UnavailableError
from ramakv.store.store import Bookkeeping

_SLICE = 1000
"""Sessions looked at between two checkpoints of a sweep."""

_EXPIRIES_MAX = 100
"""Sessions that a sweep ends at a time: their actors are few, and others' commits come between."""


class Keeper(Protocol):
    """The router, as far as the sweep knows it. All of it is synchronous."""

    def places(self) -> Sequence[Place]:
        """All sessions, as they are now."""

    def ask_quietly(self, place: Place, request: Request) -> Reply[Outcome]:
        """Ask a session what is no event: it is no younger for it. Raises UnavailableError."""

    def retire(self, actor: SessionActor) -> None:
        """End an idle actor: its next event starts another."""

    def drop_if_empty(self, place: Place) -> None:
        """Forget a session of which there is nothing left."""


class Sweeper:
    """Looks after all sessions, again and again: the router's own task."""

    def __init__(self, keeper: Keeper, around: Surroundings) -> None:
        self._keeper = keeper
        self._around = around
        self._sessions = around.config.sessions

    async def run(self) -> None:
        """Sweep often enough to be late by a tenth of the shortest time that is kept, at most."""
        sessions = self._sessions
        times = (
            sessions.passivate_seconds,
            sessions.closed_memory_seconds,
            sessions.idle_suspend_seconds,
            sessions.idle_close_seconds,
            sessions.fork_ttl_seconds,
        )
        seconds = min(60.0, max(0.05, min(time for time in times if time > 0) / 10))
        while True:
            await trio.sleep(seconds)
            await self.sweep()

    async def sweep(self) -> None:
        """Look at every session once."""
        now, now_ms = trio.current_time(), self._around.now_ms()
        forgets, expires = False, True
        expiring: list[Place] = []
        for places in _sliced(self._keeper.places(), _SLICE):
            for place in places:
                if expire := place.due(self._sessions, now - place.last_event, now_ms):
                    if expires and self._tell_expire(place, expire):
                        expiring.append(place)
                    if len(expiring) >= _EXPIRIES_MAX:
                        expires = await self._see_expire(expiring)
                        expiring = []
                else:
                    forgets |= self._look_after(place, now, now_ms)
            await trio.lowlevel.checkpoint()
        if forgets:
            memory_ms = int(self._sessions.closed_memory_seconds * 1000)
            await self._around.journal.tell(Bookkeeping(forget_closed_before_ms=now_ms - memory_ms))

    def _tell_expire(self, place: Place, expire: Expire) -> bool:
        """Have a session ended, as by any other request; returns whether it was asked now."""
        if place.expiry is not None and not place.expiry.is_set:
            return False  # it has not come to the last one yet
        try:
            place.expiry = self._keeper.ask_quietly(place, expire)
        except UnavailableError:
            return False  # it has plenty to do; it is not abandoned
        return True

    def _look_after(self, place: Place, now: float, now_ms: int) -> bool:
        """Passivate one session, or forget its close. Returns whether that was forgotten."""
        if place.actor is not None:
            idle = now - place.last_event
            if idle >= self._sessions.passivate_seconds and place.actor.is_idle:
                self._keeper.retire(place.actor)
            return False
        if place.closed_ms is not None and not is_remembered(
            place.closed_ms, now_ms, self._sessions.closed_memory_seconds
        ):
            place.closed_ms = None
            self._keeper.drop_if_empty(place)
            return True
        return False

    async def _see_expire(self, places: list[Place]) -> bool:
        """Wait until these have expired, or could not, and passivate them; not for ever.

        Returns whether others may follow: not while the store fails.
        """
        store_works = True
        with trio.move_on_after(self._around.config.limits.event_timeout_seconds):
            for place in places:
                assert place.expiry is not None
                try:
                    await place.expiry.wait()
                except StoreError:
                    store_works = False
                except RamakvError:
                    pass  # its actor crashed, and said so
        for place in places:
            if place.actor is not None and place.actor.is_idle:
                self._keeper.retire(place.actor)
        return store_works


def _sliced(places: Sequence[Place], size: int) -> Iterator[Sequence[Place]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]
