"""What became of a client's events, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Each event is counted in one of these in the end; `retried` counts tries, not events."""

    delivered: int = 0
    """Answered ok."""
    refused: int = 0
    """Answered with an error, or not what the contract allows and never sent."""
    unanswered: int = 0
    """Sent, and nobody knows what became of them."""
    unreachable: int = 0
    """Questions that were not asked, for nobody was there."""
    dropped: int = 0
    """Given up before they were sent: the queue was full, or the client closed."""
    skipped: int = 0
    """A turn_start whose moment was over before it could be sent, or an end of no fork."""
    retried: int = 0
    """Further tries."""
