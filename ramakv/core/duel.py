"""A duel: of two ways to run a cache, follow the one that does better on the load of late."""

from __future__ import annotations

import math
from dataclasses import dataclass

TURNS_REMEMBERED = 500
_TURNS_MIN = 200
_LEAD_TO_START = 0.015
"""By so much of all chunks must the challenger be better before it is followed."""

_DEVIATIONS_TO_START = 1.5
"""And by so many standard deviations: a turn finds mostly all or nothing, so turns are counted."""


@dataclass(slots=True)
class Duel:
    """The share of chunks found hot under plain LRU, and under the challenger, both in shadow."""

    turns: int = 0
    challenger_leads: bool = False
    _remembered: float = 0.0
    _wanted: float = 0.0
    _lru: float = 0.0
    _challenger: float = 0.0

    def note(self, wanted: int, lru: int, challenger: int) -> None:
        """Count one turn's chunks, and how many each had hot; the last turns count most."""
        fade = 1 - 1 / TURNS_REMEMBERED
        self.turns += 1
        self._remembered = self._remembered * fade + 1
        self._wanted = self._wanted * fade + wanted
        self._lru = self._lru * fade + lru
        self._challenger = self._challenger * fade + challenger
        if self.challenger_leads:
            self.challenger_leads = self.lead > 0
        else:
            self.challenger_leads = self.turns >= _TURNS_MIN and self.lead > self.lead_to_start

    @property
    def lead_to_start(self) -> float:
        """The lead that the challenger needs before it is followed."""
        share, turns = self.lru_share, max(1.0, self._remembered)
        return max(
            _LEAD_TO_START, _DEVIATIONS_TO_START * math.sqrt(2 * share * (1 - share) / turns)
        )

    @property
    def lead(self) -> float:
        """By what share of the chunks the challenger is better; negative where it is worse."""
        return self.challenger_share - self.lru_share

    @property
    def lru_share(self) -> float:
        """Of the chunks that turns wanted, those that LRU had hot."""
        return self._lru / self._wanted if self._wanted else 0.0

    @property
    def challenger_share(self) -> float:
        """Of the chunks that turns wanted, those that the challenger had hot."""
        return self._challenger / self._wanted if self._wanted else 0.0
