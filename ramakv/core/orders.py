"""What residency wants done, in a session's pause and when its turn starts."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Action(Enum):
    """What is to be done with a session's chunks."""

    BRING_UP = "bring up"
    RENEW = "renew"
    DEMOTE = "demote"


class Order(NamedTuple):
    """One thing to do."""

    action: Action
    session_id: str


ALL = 1 << 30
"""More chunks than any map has."""


class Advice(NamedTuple):
    """What a turn_start need not prefetch."""

    is_there: bool = False
    """All of the map: it was prefetched in the pause, and nearly all of it is there yet."""
    unwanted_end: int = 0
    """Chunks at the map's end: the turn is expected to have no use for them."""
