"""How long sessions pause, learned while they do, and what a chunk's stay in the hot tier yields.

A pause begins with a turn's end and ends with the session's next turn. What is learned is its
hazard: of the pauses that got so long, how many ended before they got a step longer. Pauses that
never end count too, as they are seen to go on.

The yield of keeping a session is the hits that its stay may be expected to bring, per second of
stay, for the length of stay for which that is most: the Gittins index of a job of unknown length
(Gittins, 1979). It is the same for each chunk of a session, so it says which session to keep
without regard to their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

Reason = Literal["tool", "end", "other", "unknown"]
"""Why a turn stopped, as far as it says how long the pause will be."""

_REASONS: dict[str, Reason] = {
    "tool_calls": "tool",
    "tool_use": "tool",
    "function_call": "tool",
    "stop": "end",
    "end_turn": "end",
}

STEPS_PER_OCTAVE = 4
FIRST_STEP_SECONDS = 0.25
STEPS = 72
"""From a quarter of a second to 16 hours, each step a fifth longer than the one before."""

_PRIOR_PAUSES = 4.0
_PRIOR_HAZARD = 0.05
"""What is taken for known before anything is: a few pauses, in which nothing happens for long."""

_PAUSES_MAX = 4000.0
"""Of more pauses than these, all count half: what is learned follows the load."""

_LEARN_AGAIN_PAUSES = 20

_DISK_LOAD_COST = 0.3
"""What a load that nobody comes for costs, in hits."""


def reason_of(finish_reason: str | None) -> Reason:
    """Classify an engine's or an API's finish reason."""
    return "unknown" if finish_reason is None else _REASONS.get(finish_reason, "other")


def step_of(seconds: float) -> int:
    """Return the step in which a pause of this age is."""
    if seconds < FIRST_STEP_SECONDS:
        return 0
    octaves = math.log2(seconds / FIRST_STEP_SECONDS)
    return min(1 + int(STEPS_PER_OCTAVE * octaves), STEPS - 1)


def ends_at(step: int) -> float:
    """Return the age at which a pause leaves this step."""
    seconds: float = FIRST_STEP_SECONDS * 2.0 ** (step / STEPS_PER_OCTAVE)
    return seconds


_LENGTHS = [ends_at(step) - (ends_at(step - 1) if step else 0.0) for step in range(STEPS)]


class Pauses:
    """The pauses after turns that stopped for one reason."""

    __slots__ = ("_ended", "_news", "_seen", "_to_keep", "_to_load", "_while_running")

    def __init__(self) -> None:
        self._seen = [0.0] * STEPS
        self._ended = [0.0] * STEPS
        self._news = 0
        self._learn(0.0)

    def lasted(self, first: int, last: int) -> None:
        """Note that a pause got through the steps from `first` to before `last`."""
        for step in range(first, last):
            self._seen[step] += 1

    def ended(self, step: int) -> None:
        """Note that a pause ended in this step."""
        self._seen[step] += 1
        self._ended[step] += 1
        self._news += 1

    def learn(self, turn_seconds: float) -> None:
        """Work the yields out again, if there is enough news. A turn takes so long on average."""
        if self._news >= _LEARN_AGAIN_PAUSES:
            self._news = 0
            self._learn(turn_seconds)
            if self._seen[0] > _PAUSES_MAX:
                self._seen = [seen / 2 for seen in self._seen]
                self._ended = [ended / 2 for ended in self._ended]

    def yield_kept(self, step: int) -> float:
        """Hits per second of stay of a session whose chunks are hot, paused for so long."""
        return self._to_keep[step]

    def yield_loaded(self, step: int) -> float:
        """The same where they would have to be loaded first; negative where that never pays."""
        return self._to_load[step]

    @property
    def yield_running(self) -> float:
        """The same for a session in a turn, which takes its time before the pause begins."""
        return self._while_running

    def share_ended_by(self, seconds: float) -> float:
        """Of all pauses, how many last no longer: for people."""
        left = 1.0
        for hazard in self._hazards()[: step_of(seconds) + 1]:
            left *= 1 - hazard
        return 1 - left

    def _hazards(self) -> list[float]:
        """Per step, smoothed with its neighbours'."""
        return [
            (self._near(self._ended, step) + _PRIOR_PAUSES * _PRIOR_HAZARD)
            / (self._near(self._seen, step) + _PRIOR_PAUSES)
            for step in range(STEPS)
        ]

    def _near(self, counts: list[float], step: int) -> float:
        return (
            2 * counts[step]
            + (counts[step - 1] if step else 0.0)
            + (counts[step + 1] if step + 1 < STEPS else 0.0)
        )

    def _learn(self, turn_seconds: float) -> None:
        hazards = self._hazards()
        self._to_keep, self._to_load = [0.0] * STEPS, [0.0] * STEPS
        for step in range(STEPS):
            for hits, seconds in _stays(hazards, step):
                self._to_keep[step] = max(self._to_keep[step], hits / seconds)
                worth = (hits - _DISK_LOAD_COST * (1 - hits)) / seconds
                self._to_load[step] = max(self._to_load[step], worth)
        self._while_running = max(
            hits / (turn_seconds + seconds) for hits, seconds in _stays(hazards, 0)
        )


def _stays(hazards: list[float], step: int) -> Iterator[tuple[float, float]]:
    """For each length of stay from a step on: the chance of a hit, and its expected seconds."""
    left, hits, seconds = 1.0, 0.0, 0.0
    for hazard, length in zip(hazards[step:], _LENGTHS[step:], strict=True):
        hits += left * hazard
        seconds += left * (1 - hazard / 2) * length
        left *= 1 - hazard
        yield hits, seconds
