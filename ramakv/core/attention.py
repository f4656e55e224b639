"""Whom a decision looks at: of thousands of sessions that pause, only those with a chance."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from heapq import heappop, heappush

from ramakv.core.candidates import Candidate
from ramakv.core.pauses import STEPS, Pauses, Reason, ends_at

_FAR = 0.25
"""What yields less than this share of what the least of the residents does, has no chance yet."""

_MORE = 1.25
"""So many times as much must somebody have to offer who was not among the best."""

_ASIDE_SECONDS = 60.0
"""How long a session is set aside at most: what is known of pauses changes."""


class Attention:
    """Keeps those to look at, and for the others when their pause is as old as to give a chance."""

    __slots__ = ("_all_at", "_aside", "_near", "_ticket")

    def __init__(self) -> None:
        self._near: dict[Candidate, None] = {}
        self._aside: list[tuple[float, int, Candidate]] = []  # a heap, by when to look again
        self._all_at = 0.0
        self._ticket = itertools.count()

    def draw(self, session: Candidate) -> None:
        """Look at a session from now on: it has a turn, or had one."""
        self._near[session] = None

    def forget(self, session: Candidate) -> None:
        """Look at a session no more: it is gone."""
        self._near.pop(session, None)
        session.is_gone = True

    def look(self, now: float, sessions: Iterable[Candidate]) -> Collection[Candidate]:
        """Return whom to look at now, of all these sessions."""
        if now >= self._all_at:
            self._all_at = now + _ASIDE_SECONDS
            self._near = dict.fromkeys(sessions)
            self._aside.clear()
        while self._aside and self._aside[0][0] <= now:
            session = heappop(self._aside)[2]
            if not session.is_gone:
                self._near[session] = None
        return self._near

    def set_aside(
        self, pauses: Mapping[Reason, Pauses], best: Collection[Candidate], price: float
    ) -> None:
        """Look no more at those out of whom nothing is to be had for this price, for a while.

        `best` are those who had most to offer; the others wait as well until they have more.
        """
        low = _FAR * price
        for session in list(self._near):
            yields = pauses[session.reason].to_load
            offers = yields[session.step]
            if session.is_running or session.is_in or (offers > low and session in best):
                continue
            del self._near[session]
            bar = max(low, _MORE * offers)
            step = next((step for step in range(session.step, STEPS) if yields[step] > bar), STEPS)
            again_at = session.since + ends_at(step - 1)
            if again_at < self._all_at:
                heappush(self._aside, (again_at, next(self._ticket), session))
