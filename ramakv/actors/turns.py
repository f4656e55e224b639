"""Turns, for operators: which sessions are in one, and the last ones of the sessions seen last."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import trio

from ramakv import events
from ramakv.actors.places import Place
from ramakv.core.session import Status

_TURNS_KEPT = 32
_SESSIONS_KEPT = 2000
"""Most turns of one session, and most sessions, that are remembered: a few megabytes."""


class Turn(NamedTuple):
    """A turn that ended."""

    ended_ms: int
    seconds: float | None
    """Since its turn_start; None where there was none."""
    chunks: int
    evicted: int


class Turns:
    """Notes turns as their events are answered. Nothing that ramakv decides depends on it.

    A turn_start begins a turn of an active session: one that is not known yet has nothing to
    show before its first turn_end.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._ended: OrderedDict[str, deque[Turn]] = OrderedDict()
        self.in_turn = 0
        """Sessions that are in a turn."""

    def of(self, session_id: str) -> Sequence[Turn]:
        """The session's last turns, the oldest first."""
        return self._ended.get(session_id, ())

    def note(self, place: Place | None, event: events.SessionEvent, outcome: object) -> None:
        """Note an event that was applied."""
        if place is None:
            return
        if isinstance(outcome, events.TurnEndData):
            began = self._leave(place)
            if place.status is Status.UNKNOWN:
                return  # closed by now, and forgotten
            seconds = None if began is None else trio.current_time() - began
            turn = Turn(self._now_ms(), seconds, outcome.chunk_count, outcome.evicted_count)
            self._keep(event.session_id, turn)
        elif isinstance(event, events.TurnStart) and place.status is Status.ACTIVE:
            self.in_turn += place.turn_began is None
            place.turn_began = trio.current_time()

    def state_changed(self, place: Place) -> None:
        """Note what became of a session: only an active one is in a turn."""
        if place.status is not Status.ACTIVE:
            self._leave(place)
        if place.status is Status.UNKNOWN:
            self._ended.pop(place.session_id, None)

    def _leave(self, place: Place) -> float | None:
        """End a session's turn, if it is in one; returns when that began."""
        if (began := place.turn_began) is not None:
            self.in_turn -= 1
            place.turn_began = None
        return began

    def _keep(self, session_id: str, turn: Turn) -> None:
        turns = self._ended.pop(session_id, None) or deque(maxlen=_TURNS_KEPT)
        turns.append(turn)
        self._ended[session_id] = turns
        if len(self._ended) > _SESSIONS_KEPT:
            self._ended.popitem(last=False)
