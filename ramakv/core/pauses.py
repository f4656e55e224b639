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
from itertools import islice
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
_LEARN_AGAIN_SHARE = 0.1
"""The yields are worked out again after so many pauses, and that share of those known."""

_LASTED_NEWS = 0.05
"""A step that a pause got through is as much news as this many that ended."""

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

    __slots__ = ("_ended", "_news", "_seen", "to_keep", "to_load", "while_running")

    def __init__(self) -> None:
        self._seen = [0.0] * STEPS
        self._ended = [0.0] * STEPS
        self._news = 0.0
        self.to_keep: list[float] = []
        """Hits per second of stay of a session whose chunks are hot, by the step it has paused."""
        self.to_load: list[float] = []
        """The same where they would have to be loaded first; 0 where that never pays."""
        self.while_running = 0.0
        """The same for a session in a turn, which takes its time before the pause begins."""
        self._learn(0.0)

    def lasted(self, first: int, last: int) -> None:
        """Note that a pause got through the steps from `first` to before `last`."""
        for step in range(first, last):
            self._seen[step] += 1
        self._news += _LASTED_NEWS * (last - first)

    def ended(self, step: int) -> None:
        """Note that a pause ended in this step."""
        self._seen[step] += 1
        self._ended[step] += 1
        self._news += 1

    def learn(self, turn_seconds: float) -> None:
        """Work the yields out again, if there is enough news. A turn takes so long on average."""
        if self._news >= max(_LEARN_AGAIN_PAUSES, _LEARN_AGAIN_SHARE * self._seen[0]):
            self._news = 0.0
            self._learn(turn_seconds)
            if self._seen[0] > _PAUSES_MAX:
                self._seen = [seen / 2 for seen in self._seen]
                self._ended = [ended / 2 for ended in self._ended]

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
        """Work the yields out.

        Over all pauses together: by the end of each step so many have ended, after so many
        seconds of stay. The yield of a stay is the slope of the line between two such points,
        so the most that can be had from a step on is a slope of the points' upper hull.
        """
        points, left, ended, seconds = [(0.0, 0.0)], 1.0, 0.0, 0.0
        for hazard, length in zip(self._hazards(), _LENGTHS, strict=True):
            ended += left * hazard
            seconds += left * (1 - hazard / 2) * length
            left *= 1 - hazard
            points.append((seconds, ended))
        self.to_keep, self.to_load = [0.0] * STEPS, [0.0] * STEPS
        hull: list[tuple[float, float]] = []  # of the points from a step on; the first is last
        for step in reversed(range(STEPS)):
            _add(hull, points[step + 1])
            here, ended = points[step]
            self.to_keep[step] = _steepest(hull, here, ended)
            # What is loaded for those who do not come costs hits, for each of those left.
            waste = _DISK_LOAD_COST / (1 + _DISK_LOAD_COST) * (1 - ended)
            worth = (1 + _DISK_LOAD_COST) * _steepest(hull, here, ended + waste)
            self.to_load[step] = max(0.0, worth)
        self.while_running = _steepest(hull, -turn_seconds, 0.0)


def _slope(x: float, y: float, point: tuple[float, float]) -> float:
    return (point[1] - y) / (point[0] - x)


def _add(hull: list[tuple[float, float]], point: tuple[float, float]) -> None:
    """Put a point before all others of an upper hull."""
    while len(hull) > 1 and _slope(*point, hull[-1]) <= _slope(*point, hull[-2]):
        hull.pop()
    hull.append(point)


def _steepest(hull: list[tuple[float, float]], x: float, y: float) -> float:
    """The steepest slope from a place before an upper hull to one of its points."""
    steepest = _slope(x, y, hull[-1])
    for point in islice(reversed(hull), 1, None):
        if (slope := _slope(x, y, point)) <= steepest:
            break
        steepest = slope
    return steepest
